"""Requests to real replicas: methods, callbacks, disconnects and bodies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.replicas.replicas import Replica, new_request_id, running_replica
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes


def test_each_http_method_calls_its_handler_and_others_get_405() -> None:
    source = """
        class Handler:
            def __init__(self, config):
                pass

            def handle_get(self, query_params):
                return query_params["name"]

            def handle_put(self, payload, headers):
                return {"payload": payload, "x": headers["X-Thing"]}
    """
    with running_replica(source) as replica:
        replica.wait_ready()
        got = replica.request(method="GET", path="/api?name=iris%20v")
        assert (got.status, got.body, got.headers["content-type"]) == (200, b"iris v", "text/plain; charset=utf-8")
        put = replica.request([1], method="PUT", headers={"x-thing": "7"})
        assert put.json == {"payload": [1], "x": "7"}
        post = replica.request([1])
        assert post.status == 405
        assert post.headers["allow"] == "GET, PUT"
        info = replica.request(method="GET", headers={"x-cortex-info": "1"})
        assert set(info.json["methods"]) == {"GET", "PUT"}


@pytest.fixture(scope="module")
def older() -> Iterator[Replica]:
    source = """
        def predict(sample, metadata):
            return [sample["id"]] * 1000 if sample["id"] else 1 / 0
    """
    with running_replica(source, interface="functions") as replica:
        replica.wait_ready()
        yield replica


def test_get_on_an_older_api_explains_how_to_call_it(older: Replica) -> None:
    assert "sending a post request" in older.request(method="GET").json["message"]


def test_an_older_api_logs_sample_and_prediction_on_demand(older: Replica) -> None:
    assert older.request({"id": 1}, path="/api?nodebug=true").json == [1] * 1000
    assert older.request({"id": 2, "text": "x" * 9999}, path="/api?a=b&debug=true").status == 200
    assert older.request({"id": 0}, path="/api?debug=True").status == 500
    wait_until(lambda: "ZeroDivisionError" in older.log(), message="the log has the failed request")
    log = older.log()
    assert "sample: {'id': 1" not in log
    assert "sample: {'id': 2, 'text': 'xxx" in log
    assert "prediction: [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, ...]" in log
    assert "sample: {'id': 0}" in log
    assert max(map(len, log.splitlines())) < 700


def test_async_calls_run_concurrently_and_time_out_separately() -> None:
    source = """
        import asyncio

        class Handler:
            def __init__(self, config):
                self.inside = 0

            async def handle_post(self, payload):
                self.inside += 1
                while payload["late"] or self.inside < 11:
                    await asyncio.sleep(0.01)
                return {}
    """
    with running_replica(source, timeout_s=15) as replica, ThreadPoolExecutor(12) as pool:
        pid = replica.wait_ready().processes[0].pid
        late = pool.submit(replica.request, {"late": True}, request_id=new_request_id(ago_s=10))
        good = [pool.submit(replica.request, {"late": False}) for _ in range(10)]
        assert [future.result(60).status for future in good] == [200] * 10
        assert late.result(60).status == 504
        assert replica.status().processes[0].pid == pid


def test_a_worker_whose_event_loop_is_blocked_is_replaced() -> None:
    source = """
        import time

        class Handler:
            def __init__(self, config):
                pass

            async def handle_post(self, payload):
                time.sleep(payload["s"])
                return {}
    """
    with running_replica(source, timeout_s=15) as replica:
        replica.wait_ready()
        answer = replica.request({"s": 60}, request_id=new_request_id(ago_s=12))
        assert answer.status == 504
        wait_until(lambda: replica.wait_ready().processes[0].restarts == 1)
        assert replica.request({"s": 0}).status == 200


def test_callbacks_and_post_predict_run_after_the_response(tmp_path: Path) -> None:
    handler = """
        import pathlib, time

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                return {"y": 1}, lambda: wait(payload["go"])

        def wait(go):
            while not pathlib.Path(go).exists():
                time.sleep(0.01)
            print("after handler", flush=True)
    """
    predictor = """
        class PythonPredictor:
            def __init__(self, config):
                pass

            def predict(self, payload):
                return payload["x"] + 1

            def post_predict(self, response, payload):
                print("after", payload, response, flush=True)
                raise ValueError("seen in the log")
    """
    with running_replica(handler) as replica:
        replica.wait_ready()
        answer = replica.request({"go": str(tmp_path / "go")})
        assert answer.json == {"y": 1}
        (tmp_path / "go").touch()
        wait_until(lambda: "after handler" in replica.log())
    with running_replica(predictor, interface="predictor") as replica:
        replica.wait_ready()
        assert replica.request({"x": 1}).body == b"2"
        wait_until(lambda: "after {'x': 1} 2" in replica.log() and "seen in the log" in replica.log())


def test_accepts_bodies_of_every_framing_and_rejects_too_large_ones() -> None:
    source = """
        import hashlib

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                return hashlib.sha256(payload).hexdigest()
    """
    with running_replica(source, max_body_bytes=3_000_000) as replica:
        replica.wait_ready()
        binary = {"content-type": "application/octet-stream"}
        for size in (0, 1, 65_536, 2_999_999):
            plain = replica.request(body=b"x" * size, headers=binary)
            connection = replica.connection()
            connection.request("POST", "/", iter([b"x" * size]), binary, encode_chunked=True)
            assert connection.getresponse().read() == plain.body
            connection.close()
        connection = replica.connection()
        connection.request("POST", "/", iter([b"x" * 3_000_001]), binary, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        assert replica.request(body=b"x", headers=binary).status == 200


def test_user_code_runs_on_one_thread() -> None:
    source = """
        import threading, time

        class Handler:
            def __init__(self, config):
                self.thread = threading.get_ident()

            def handle_post(self, payload):
                time.sleep(payload["s"])
                return threading.get_ident() == self.thread
    """
    with running_replica(source) as replica:
        replica.wait_ready()
        for pause, times in ((0, 20), (0.02, 5), (0, 150), (0.02, 5)):
            assert {replica.request({"s": pause}).body for _ in range(times)} == {b"true"}


def test_rejects_malformed_http_and_serves_the_next_connection(older: Replica) -> None:
    for junk in (
        b"\x00\x01\r\n\r\n",
        b"POST / HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(older.spec.sockets[0])
            sock.sendall(junk)
            assert sock.recv(4096).startswith(b"HTTP/1.1 400")
    assert older.request({"id": 1}).status == 200


def test_slots_are_never_exceeded() -> None:
    source = """
        import threading, time

        class Handler:
            def __init__(self, config):
                self.live = 0
                self.most = 0
                self.lock = threading.Lock()

            def handle_post(self, payload):
                with self.lock:
                    self.live += 1
                    self.most = max(self.most, self.live)
                time.sleep(0.02)
                with self.lock:
                    self.live -= 1
                return self.most
    """
    with running_replica(source, threads=3) as replica, ThreadPoolExecutor(16) as pool:
        replica.wait_ready()
        for _ in range(3):
            replica.request({})
        answers = list(pool.map(lambda _: int(replica.request({}).body), range(100)))
        assert max(answers) == 3
        assert threading.active_count() < 40


FORM = {"content-type": "application/x-www-form-urlencoded"}
HANDLER = """
    from starlette.datastructures import FormData

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return {"hello": payload["name"]}

        def handle_put(self, payload: FormData):
            return {"form": dict(payload)}
"""
OLDER = """
    class PythonPredictor:
        def __init__(self, config):
            pass

        def predict(self, payload):
            return {"hello": payload["name"]}
"""


def test_json_with_a_forgotten_content_type_is_json_unless_the_method_asks_for_a_form() -> None:
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        assert replica.request(body=b'{"name": "Ada"}', headers=FORM).json == {"hello": "Ada"}
        assert replica.request(body=b"name=Ada", headers=FORM).json == {"hello": "Ada"}
        failed = replica.request(body=b'{"names": "Ada"}', headers=FORM)
        assert failed.status == 500
        assert "content-type" not in failed.json["error"]
        put = replica.request(body=b'{"name": "Ada"}', method="PUT", headers=FORM)
        assert put.json == {"form": {'{"name": "Ada"}': ""}}
        for headers in ({"content-type": "application/json"}, {"content-type": "text/plain"}):
            refused = replica.request(body=b'{"name": "Ada"}', method="PUT", headers=headers)
            assert (refused.status, refused.json["detail"][0]["type"]) == (422, "form_type")


def test_older_generations_keep_the_form_and_the_error_names_the_content_type() -> None:
    with running_replica(OLDER, interface="predictor") as replica:
        replica.wait_ready()
        assert replica.request(body=b"name=Ada", headers=FORM).json == {"hello": "Ada"}
        failed = replica.request(body=b'{"name": "Ada"}', headers=FORM)
        assert failed.status == 500
        assert failed.json["error"].startswith("internal server error: KeyError in predict(); `cortex logs ")
        assert failed.json["error"].endswith(
            "; the body is JSON, but was sent with the content type application/x-www-form-urlencoded:"
            " send the header `content-type: application/json`"
        )
        assert "content-type" not in replica.request({"names": "Ada"}).json["error"]


def test_a_plain_call_that_waits_for_a_thread_does_not_die_with_the_one_that_runs() -> None:
    source = """
        import os, time

        class Handler:
            def __init__(self, config):
                pass

            async def handle_get(self):
                return "async"

            def handle_post(self, payload):
                while payload["gate"] and not os.path.exists(payload["gate"]):
                    time.sleep(0.01)
                if payload["gate"]:
                    os._exit(3)
    """
    with running_replica(source, timeout_s=PATIENCE_S) as replica, ThreadPoolExecutor(8) as pool:
        replica.wait_ready()
        gate = Path(replica.spec.run_dir) / "gate"
        dying = pool.submit(replica.request, {"gate": str(gate)})
        assert replica.request(method="GET").body == b"async"  # it needs no thread
        waiting = [pool.submit(replica.request, {"gate": ""}) for _ in range(6)]
        for _ in range(20):
            assert replica.request(method="GET").status == 200
        gate.touch()
        assert dying.result().status == 500
        # Those that had been read were to run after it; the next process answers the others.
        assert {answer.result().status for answer in waiting} <= {200, 503}
