"""Batches in real replicas: their requests, results and failures."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.worker.monitoring.metrics import SeriesKind, read_folder, read_metrics, series_key
from cortex.worker.requests.batching import Bisection, WrongResult, results_of_batch
from harness.connections import unread_bytes
from harness.replicas.replicas import Answer, Replica, new_request_id, read, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

#: The first call waits at a gate, so that all requests sent meanwhile form the second.
SOURCE = """
    import os, pathlib, time

    calls = []

    class Handler:
        def __init__(self, config):
            pass

        def handle_get(self):
            return calls

        def handle_post(self, payload, query_params):
            assert type(payload) is list and len(payload) == len(query_params)
            calls.append([dict(item) for item in payload])
            if payload[0].get("gate"):
                pathlib.Path(os.environ["SHARED_FOLDER"], "begun").touch()
                while not pathlib.Path(os.environ["SHARED_FOLDER"], "open").exists():
                    time.sleep(0.001)
            for item in payload:
                item["seen"] = item.get("seen", 0) + 1
            if any(item.get("poison") for item in payload):
                raise ValueError("poisonous")
            if payload[0].get("no_list"):
                return {"kept": 1}
            return [item for item in payload if not item.get("lost")]
"""
#: With a generator among the methods, calls run on threads however quick they are, and the event loop reads meanwhile.
ON_THREADS = "\n        def handle_put(self):\n            yield 1\n"
BATCHING = {"max_batch_size": 32, "batch_interval_s": 0.05}
HEADERS = {"content-type": "application/json"}


@dataclass
class Batched:
    """A replica whose calls can be blocked."""

    replica: Replica
    calls_before: int = 0  #: the blocked one

    def ask_together(self, payloads: list[Any], ids: dict[int, str] | None = None, leave: int = -1) -> list[Answer]:
        """Send requests while a call is blocked, so that they form one batch; client `leave` disconnects meanwhile."""
        connections = self.send_together(payloads, ids, leave)
        return [read(connection.getresponse(), time.monotonic()) for connection in connections]

    def send_together(
        self, payloads: list[Any], ids: dict[int, str] | None = None, leave: int = -1
    ) -> list[HTTPConnection]:
        """Send requests like `ask_together`; return the connections except that of `leave`."""
        self.calls_before = len(self.replica.request(method="GET").json)
        connections = [self.replica.connection() for _ in payloads]
        for connection in connections:  # the worker has accepted all of them before the call starts
            connection.request("GET", "/")
            connection.getresponse().read()
        gate = self.replica.connection()
        gate.request("POST", "/", json.dumps({"gate": True}), HEADERS)
        folder = Path(self.replica.spec.run_dir)
        wait_until((folder / "begun").exists, message="the call has begun")
        for index, (connection, payload) in enumerate(zip(connections, payloads, strict=True)):
            request_id = (ids or {}).get(index) or new_request_id()
            body = payload if isinstance(payload, str) else json.dumps(payload)
            connection.request("POST", "/", body, {**HEADERS, "x-cortex-request-id": request_id})
        if leave >= 0:
            connections.pop(leave).close()
            wait_until(self.has_counted_a_disconnect, message="the worker has noticed that a client left")
        # The event loop reads them on a thread of its own; beyond the slots, they stay in their sockets.
        unread = max(len(connections) + 1 - self.replica.status().slots, 0)
        wait_until(lambda: sum(map(bool, map(unread_bytes, connections))) <= unread, message="the requests are read")
        (folder / "open").touch()
        assert gate.getresponse().read() == b'[{"gate":true,"seen":1}]'[1:-1]
        for name in ("begun", "open"):  # for the next batch
            (folder / name).unlink()
        return connections

    def has_counted_a_disconnect(self) -> bool:
        """Return whether a client has left before its response; `metrics_dir` is needed."""
        counted = series_key(SeriesKind.COUNTER, "cortex_replica_requests_total", {"code": "499"})
        return read_folder(Path(self.replica.spec.metrics_dir)).get(counted) == 1

    def calls(self) -> list[list[dict[str, Any]]]:
        """Return the payloads of each call after the blocked one."""
        return list(self.replica.request(method="GET").json)[self.calls_before + 1 :]


@contextlib.contextmanager
def batched(source: str = SOURCE, **fields: Any) -> Iterator[Batched]:
    with running_replica(source, **{**BATCHING, **fields}) as replica:
        replica.wait_ready()
        yield Batched(replica)


@pytest.fixture(scope="module")
def replica() -> Iterator[Batched]:
    with batched(SOURCE + ON_THREADS) as started:
        yield started


@pytest.fixture(scope="module")
def keyed() -> Iterator[Batched]:
    with batched(KEYED.format(name="Handler", method="handle_post") + ON_THREADS, max_batch_size=4) as started:
        yield started


def test_waiting_requests_form_one_batch_and_get_their_own_results(tmp_path: Path) -> None:
    with batched(metrics_dir=str(tmp_path)) as replica:
        answers = replica.ask_together([{"n": n} for n in range(20)])
        assert [answer.json for answer in answers] == [{"n": n, "seen": 1} for n in range(20)]
        assert [len(call) for call in replica.calls()] == [20]
        assert "batch;dur=" in answers[0].headers["server-timing"]
        (file,) = tmp_path.glob("0-*")
        bucket = series_key(SeriesKind.BUCKET, "cortex_batch_size", {"le": "32"})
        wait_until(lambda: read_metrics(file)[bucket] == 1, message="a batch of 17 to 32 was counted")


def test_a_batch_has_at_most_the_maximum_size() -> None:
    with batched(max_batch_size=8) as replica:
        answers = replica.ask_together([{"n": n} for n in range(20)])
        assert [answer.json["n"] for answer in answers] == list(range(20))
        assert sorted(len(call) for call in replica.calls()) == [4, 8, 8]


#: As above; a request is answered with the numbers of all requests of its call.
KEYED = """
    import os, pathlib, time

    class {name}:
        def __init__(self, config):
            pass

        def batch_key(self, payload):
            if payload.get("key") == "fails":
                raise ValueError("no key")
            return float("nan") if payload.get("key") == "nan" else payload.get("key")

        def {method}(self, payload):
            if payload[0].get("gate"):
                pathlib.Path(os.environ["SHARED_FOLDER"], "begun").touch()
                while not pathlib.Path(os.environ["SHARED_FOLDER"], "open").exists():
                    time.sleep(0.001)
                return [{{"gate": True, "seen": 1}}]
            if any(item.get("poison") for item in payload):
                raise ValueError("poisonous")
            return [[item.pop("n") for item in payload]] * len(payload)
"""


@pytest.mark.parametrize(
    ("interface", "name", "method"),
    [("handler", "Handler", "handle_post"), ("predictor", "PythonPredictor", "predict")],
)
def test_a_batch_has_only_requests_with_the_same_key(interface: str, name: str, method: str) -> None:
    with batched(KEYED.format(name=name, method=method), interface=interface) as replica:
        answers = replica.ask_together([{"n": n, "key": n % 3} for n in range(12)])
        assert [answer.json for answer in answers] == [list(range(n % 3, 12, 3)) for n in range(12)]


def test_each_key_has_batches_of_at_most_the_maximum_size(keyed: Batched) -> None:
    answers = keyed.ask_together([{"n": n, "key": [n % 2]} for n in range(2)])
    assert [answer.status for answer in answers] == [500, 500], "a list cannot be a key"
    assert "TypeError in batch_key()" in answers[0].json["error"]
    answers = keyed.ask_together([{"n": n, "key": n % 2} for n in range(12)])
    sizes = {n: len(answer.json) for n, answer in enumerate(answers)}
    assert all(n in answer.json for n, answer in enumerate(answers))
    assert sorted(sizes.values()) == [2] * 4 + [4] * 8


def test_a_request_without_a_valid_key_fails_alone(keyed: Batched) -> None:
    payloads = [{"n": 0}, {"n": 1, "key": "fails"}, "{", {"n": 3, "key": "nan"}, {"n": 4, "key": "nan"}, {"n": 5}]
    answers = keyed.ask_together(payloads)
    assert [answer.status for answer in answers] == [200, 500, 400, 200, 200, 200]
    assert "ValueError in batch_key()" in answers[1].json["error"]
    assert [answers[n].json for n in (0, 3, 4, 5)] == [[0, 5], [3], [4], [0, 5]]


#: `odd_key` of a payload names its key. Of those that are equal, each batch has several.
ODD_KEYS = """
    import numpy

    class Odd:
        def __init__(self, hashed, equal):
            self.hashed, self.equal = hashed, equal

        def __hash__(self):
            return self.hashed

        def __eq__(self, other):
            return self.equal()

    class Ambiguous:
        def __bool__(self):
            raise TypeError("the truth value of NA is ambiguous")

    class Unhashable:
        def __hash__(self):
            raise SystemExit(3)

    NA = Odd(1001, Ambiguous)
    ODD_KEYS = {
        "integer": lambda: numpy.int64(7),
        "index": lambda: numpy.searchsorted(numpy.array([4, 16]), 5),
        "boolean": lambda: numpy.bool_(False),
        "date": lambda: numpy.datetime64("2026-11-28"),
        "text": lambda: numpy.str_("text"),
        "NA": lambda: NA,
        "array": lambda: numpy.array([1, 2]),
        "hash exits": Unhashable,
        "ambiguous": lambda: Odd(1002, Ambiguous),
        "compares as array": lambda: Odd(1003, lambda: numpy.array([True, False])),
        "comparison raises": lambda: Odd(1004, lambda: 1 / 0),
        "comparison exits": lambda: Odd(1005, lambda: exit(3)),
    }
"""
#: The statuses of two requests with such a key that wait at the same time.
ODD_STATUSES = {
    **dict.fromkeys(["integer", "index", "boolean", "date", "text", "NA"], [200, 200]),
    **dict.fromkeys(["array", "hash exits"], [500, 500]),
    **dict.fromkeys(["ambiguous", "compares as array", "comparison raises", "comparison exits"], [200, 500]),
}


def test_odd_keys_fail_at_most_their_own_requests() -> None:
    source = ODD_KEYS + KEYED.format(name="Handler", method="handle_post").replace(
        "return float", 'if "odd_key" in payload: return ODD_KEYS[payload["odd_key"]]()\n            return float'
    )
    with batched(source) as replica:
        process, names = replica.replica.pid, list(ODD_STATUSES)
        answers = replica.ask_together([{"n": n, "odd_key": name} for n, name in enumerate(names * 2)])
        pairs = {name: [answers[n], answers[n + len(names)]] for n, name in enumerate(names)}
        statuses = {name: sorted(answer.status for answer in pair) for name, pair in pairs.items()}
        assert statuses == ODD_STATUSES
        for n, name in enumerate(names):
            if ODD_STATUSES[name] == [200, 200]:
                assert [sorted(answer.json) for answer in pairs[name]] == [[n, n + len(names)]] * 2, name
        assert replica.replica.request({"n": 99, "odd_key": "integer"}).json == [99]
        assert replica.replica.pid == process


def test_a_failed_batch_with_a_key_is_bisected(keyed: Batched) -> None:
    answers = keyed.ask_together([{"n": n, "key": n % 2, "poison": n == 4} for n in range(8)])
    assert [answer.status for answer in answers] == [500 if n == 4 else 200 for n in range(8)]
    assert answers[1].json == [1, 3, 5, 7]


def test_only_the_failing_request_of_a_batch_fails(replica: Batched) -> None:
    known = replica.replica.log().count("Traceback")
    payloads = [{"n": n, "poison": n == 13} for n in range(32)]
    answers = replica.ask_together(payloads, ids={13: new_request_id() + "-guilty"})
    assert [answer.status for answer in answers] == [500 if n == 13 else 200 for n in range(32)]
    assert "ValueError in handle_post()" in answers[13].json["error"]
    # Changes that a failed call made to a payload are discarded.
    assert {answer.json["seen"] for answer in answers if answer.status == 200} == {1}
    assert len(replica.calls()) <= 1 + 2 * math.log2(32) + 1
    wait_until(lambda: "-guilty failed:" in replica.replica.log())
    wait_until(lambda: replica.replica.log().count("Traceback") == known + 1)


def test_the_whole_batch_fails_without_bisection() -> None:
    with batched(isolates_failures=False) as replica:
        answers = replica.ask_together([{"n": n, "poison": n == 3} for n in range(8)])
        assert [answer.status for answer in answers] == [500] * 8
        assert len({answer.json["request_id"] for answer in answers}) == 8
        assert len(replica.calls()) == 1
        wait_until(lambda: "that was a batch of 8 requests: " in replica.replica.log())
        answers = replica.ask_together([{"n": n, "no_list": True} for n in range(3)])
        assert [answer.status for answer in answers] == [500] * 3
        assert "got a batch of 3 requests and returned dict" in answers[0].json["error"]


def test_a_missing_result_fails_its_request(replica: Batched) -> None:
    answers = replica.ask_together([{"n": n, "lost": n == 2} for n in range(6)])
    assert [answer.status for answer in answers] == [200, 200, 500, 200, 200, 200]
    told = "handle_post() got a batch of 1 request and returned a list of 0: return a list with one result for each"
    assert told in answers[2].json["error"]


@pytest.mark.parametrize(
    ("result", "fix"),
    [
        (numpy.zeros(2), "; .tolist() converts it"),
        ((1, 2), "; list() converts it"),
        (iter([1, 2]), "; list() converts it"),
        ({"a": 1}, "in the same order"),
        ([1], "in the same order"),
    ],
)
def test_a_wrong_result_is_named_with_its_fix(result: object, fix: str) -> None:
    with pytest.raises(WrongResult) as caught:
        results_of_batch("handle_post", 2, result)
    assert str(caught.value).endswith(fix)


def test_a_list_that_iterates_otherwise_fails_its_batch_only() -> None:
    class Short(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    with pytest.raises(WrongResult, match="returned a list of 1"):
        results_of_batch("handle_post", 2, Short([1, 2]))


def test_a_result_of_the_wrong_type_is_not_bisected(replica: Batched) -> None:
    answers = replica.ask_together([{"n": n, "no_list": True} for n in range(8)])
    assert [answer.status for answer in answers] == [500] * 8
    assert len(replica.calls()) == 1


def test_invalid_and_late_requests_are_excluded_from_a_batch(replica: Batched) -> None:
    late = {2: new_request_id(ago_s=61)}
    answers = replica.ask_together([{"n": 0}, "{", {"n": 2}, {"n": 3}], ids=late)
    assert [answer.status for answer in answers] == [200, 400, 504, 200]
    assert (
        answers[2].json["error"].startswith("timed out after 60 s")
    )  # from the worker or its supervisor, whichever is first
    assert [[item["n"] for item in call] for call in replica.calls()] == [[0, 3]]


def test_requests_are_batched_after_an_invalid_one(replica: Batched) -> None:
    for _ in range(2):
        assert replica.replica.request(body=b"{").status == 400
        replica.ask_together([{"n": n} for n in range(20)])
        assert [len(call) for call in replica.calls()] == [20]


def test_a_disconnected_request_is_excluded_from_a_batch(tmp_path: Path) -> None:
    with batched(SOURCE + ON_THREADS, metrics_dir=str(tmp_path)) as replica:
        answers = replica.ask_together([{"n": n} for n in range(4)], leave=1)
        assert [answer.json["n"] for answer in answers] == [0, 2, 3]
        assert [[item["n"] for item in call] for call in replica.calls()] == [[0, 2, 3]]


def test_a_result_that_cannot_be_encoded_fails_alone() -> None:
    source = SOURCE.replace("return [item for", "return [{1} if item.get('bad') else item for")
    with batched(source) as replica:
        answers = replica.ask_together([{"n": n, "bad": n == 1} for n in range(3)])
        assert [answer.status for answer in answers] == [200, 500, 200]
        assert len(replica.calls()) == 1


ASYNC = (
    SOURCE.replace("def handle_post", "async def handle_post")
    .replace("import os", "import asyncio, os")
    .replace("time.sleep(", "await asyncio.sleep(")
)
STUCK, STUCK_ASYNC = (
    source.replace('raise ValueError("poisonous")', f"{sleep}(60)")
    for source, sleep in ((SOURCE, "time.sleep"), (ASYNC, "await asyncio.sleep"))
)


def test_async_methods_receive_batches() -> None:
    with batched(ASYNC) as replica:
        answers = replica.ask_together([{"n": n, "poison": n == 5} for n in range(16)])
        assert [answer.status for answer in answers] == [500 if n == 5 else 200 for n in range(16)]
        assert len(replica.calls()) <= 1 + 2 * math.log2(16) + 1


def test_a_slow_async_batch_times_out_without_replacing_its_worker() -> None:
    source = """
        import asyncio, os, time

        class Handler:
            def __init__(self, config):
                pass

            async def handle_post(self, payload):
                if payload[0]["stuck"]:
                    time.sleep(5.5)  # the event loop is late, as on a loaded machine
                    await asyncio.sleep(60)
                return [os.getpid()] * len(payload)
    """
    with batched(source, timeout_s=5) as batch:
        replica = batch.replica
        pid = replica.request({"stuck": False}).json
        answer = replica.request({"stuck": True})
        assert (answer.status, answer.json["error"]) == (504, "timed out after 5 s")
        assert replica.request({"stuck": False}).json == pid


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_run_on_as_many_threads_as_configured(threads: int) -> None:
    source = """
        import threading, time

        lock, running, most = threading.Lock(), 0, 0

        class Handler:
            def __init__(self, config):
                pass

            def handle_get(self):
                yield str(most)

            def handle_post(self, payload):
                global running, most
                with lock:
                    running += 1
                    most = max(most, running)
                time.sleep(0.02)
                with lock:
                    running -= 1
                return payload
    """
    with batched(source, threads=threads, max_batch_size=2, batch_interval_s=0.001) as batch:
        connections = [batch.replica.connection() for _ in range(12)]
        for number, connection in enumerate(connections):
            connection.request("POST", "/", json.dumps(number), HEADERS)
        assert [json.loads(connection.getresponse().read()) for connection in connections] == list(range(12))
        assert batch.replica.request(method="GET").body == str(threads).encode()


def test_a_single_request_is_a_batch_of_one(replica: Batched) -> None:
    answers = [replica.replica.request({"n": n, "lost": n == 2}, request_id=new_request_id()) for n in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 500, 200]
    assert answers[3].json == {"n": 3, "lost": False, "seen": 1}
    assert "got a batch of 1 request and returned a list of 0" in answers[2].json["error"]
    assert "batch;dur=" in answers[3].headers["server-timing"]


def test_a_lone_request_gets_the_error_among_its_results() -> None:
    source = """
        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                from starlette.exceptions import HTTPException

                return [HTTPException(418, "teapot") if item == 13 else item for item in payload]
    """
    with running_replica(source, **BATCHING) as replica:
        replica.wait_ready()
        for _ in range(200):  # quick calls of lone requests move to the event loop
            assert replica.request(1).json == 1
        assert replica.request(13).status == 418


def test_hooks_after_the_response_run_for_each_request() -> None:
    source = """
        import os, pathlib, time

        class PythonPredictor:
            def __init__(self, config):
                pass

            def predict(self, payload):
                if payload[0].get("gate"):
                    pathlib.Path(os.environ["SHARED_FOLDER"], "begun").touch()
                    while not pathlib.Path(os.environ["SHARED_FOLDER"], "open").exists():
                        time.sleep(0.001)
                return [{**item, "seen": 1} for item in payload]

            def post_predict(self, response, payload):
                print(f"{payload} became {response}")
    """
    with batched(source, interface="predictor") as batch:
        answers = batch.ask_together([{"n": n} for n in range(3)])
        assert [answer.json["n"] for answer in answers] == [0, 1, 2]
        for n in range(3):
            told = f"{{'n': {n}}} became {{'n': {n}, 'seen': 1}}"
            wait_until(lambda told=told: told in batch.replica.log(), message=told)  # type: ignore[misc]


def test_a_slow_batch_gets_504_and_its_worker_is_replaced() -> None:
    with batched(STUCK, timeout_s=15) as batch:
        connections = [batch.replica.connection() for _ in range(3)]
        for connection in connections:
            headers = {**HEADERS, "x-cortex-request-id": new_request_id(ago_s=12)}
            connection.request("POST", "/", b'{"poison": true}', headers)
        assert [connection.getresponse().status for connection in connections] == [504] * 3
        batch.replica.wait_ready()
        assert batch.replica.request({"n": 9}, request_id=new_request_id()).json["n"] == 9


@pytest.mark.parametrize(("source", "status"), [(STUCK, 500), (STUCK_ASYNC, 200)], ids=["sync", "async"])
def test_requests_of_a_stuck_batch_are_retried_if_it_can_be_cancelled(source: str, status: int) -> None:
    with batched(source, timeout_s=15.0) as batch:
        payloads = [{"n": n, "poison": n == 2} for n in range(6)]

        answers = batch.ask_together(payloads, ids={2: new_request_id(ago_s=13.0)})

        assert [answer.status for answer in answers] == [504 if n == 2 else status for n in range(6)]
        if status == 500:
            reason = "timed out after 15 s, in a batch with 4 other requests"
            assert answers[0].json["error"] == f"the process that handled this request died: {reason}"


def sockets_of(pid: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(file.readlink()))
    return {name for name in found if name.startswith("socket:")}


def test_a_disconnected_client_of_a_stuck_batch_leaves_no_socket() -> None:
    with batched(STUCK_ASYNC) as batch:
        supervisor = batch.replica.process.pid
        before = sockets_of(supervisor)
        payloads = [{"n": n, "poison": n == 0} for n in range(3)]
        connections = batch.send_together(payloads, ids={0: new_request_id(ago_s=55.0)})
        held = sockets_of(supervisor) - before
        wait_until(batch.calls, message="the call has begun")
        assert [[item["n"] for item in call] for call in batch.calls()] == [[0, 1, 2]]

        connections[1].close()

        assert [connections[n].getresponse().status for n in (0, 2)] == [504, 200]
        connections[0].close()
        connections[2].close()
        assert len(held) >= 3
        wait_until(lambda: not held & sockets_of(supervisor), message="all three are closed")


def test_slots_allow_the_next_batch_to_wait() -> None:
    with batched(max_batch_size=16, threads=2) as batch:
        assert batch.replica.status().slots == 48


@given(st.integers(1, 200), st.data())
def test_bisection_fails_exactly_the_requests_that_raise(size: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, size - 1), max_size=3))
    parts, calls, failed, done = Bisection(range(size), is_enabled=True), 0, set(), []
    while (part := parts.next()) is not None:
        calls += 1
        if guilty.isdisjoint(part):
            done += part
        elif not parts.split(part):
            failed |= set(part)
    assert failed == guilty
    assert sorted(done) == sorted(set(range(size)) - guilty)
    assert calls <= 1 + 2 * math.ceil(math.log2(size)) * len(guilty)
