"""Server-side batching through the gateway: what fails if one request of a batch raises, or ends the process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.installations.installation import Installation, write_project
from harness.replicas.replicas import Answer

SOURCE = """
    import ctypes, os, time

    class Handler:
        def __init__(self, config):
            self.calls = config["calls"]

        def handle_post(self, payload):
            with open(self.calls, "a") as calls:
                print(*payload, file=calls)
            largest = max((number for number in payload if isinstance(number, int)), default=0)
            time.sleep(0.5 if largest >= 100 else 0.05)
            for number in payload:
                if number == "raise":
                    raise ValueError("not a number")
                if number == "segfault":
                    ctypes.string_at(0)
            return [{"doubled": number * 2, "size": len(payload), "pid": os.getpid()} for number in payload]
"""
CONFIG = """
    - name: doubler
      kind: RealtimeAPI
      handler:
        type: python
        path: handler.py
        config: {{calls: {calls}}}
        processes_per_replica: {processes}
        threads_per_process: {threads}
        server_side_batching: {{max_batch_size: 32, batch_interval: 20ms}}
"""


@pytest.fixture(scope="module", params=[(1, 1), (2, 1), (1, 4)], ids=["1-process", "2-processes", "4-threads"])
def api(
    request: pytest.FixtureRequest, cortex: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    folder: Path = tmp_path_factory.mktemp("doubler")
    processes, threads = request.param
    config = CONFIG.format(calls=folder / "calls", processes=processes, threads=threads)
    cortex.cortex("deploy", write_project(folder, SOURCE, config))
    yield cortex


def send_together(cortex: Installation, payloads: list[object]) -> list[Answer]:
    """Send each on a connection of its own, all at the same time."""
    together = threading.Barrier(len(payloads))

    def send(payload: object) -> Answer:
        together.wait(30)
        return cortex.post("/doubler", payload)

    with ThreadPoolExecutor(len(payloads)) as pool:
        return list(pool.map(send, payloads))


def test_simultaneous_requests_are_one_call(api: Installation) -> None:
    numbers = list(range(100, 164))  # whose calls last until the other requests of a loaded machine have arrived
    replies = send_together(api, numbers)

    assert [reply.json["doubled"] for reply in replies] == [2 * number for number in numbers]
    assert max(reply.json["size"] for reply in replies) > 8
    assert all("batch;dur=" in reply.headers["server-timing"] for reply in replies)


def test_one_poisonous_request_of_32_fails_alone(api: Installation) -> None:
    replies = send_together(api, [*range(31), "raise"])

    assert Counter(reply.status for reply in replies) == {200: 31, 500: 1}
    assert [reply.json["doubled"] for reply in replies[:31]] == [2 * number for number in range(31)]
    assert "ValueError in handle_post()" in replies[31].json["error"]
    assert api.post("/doubler", 4).json["doubled"] == 8


def test_requests_of_a_batch_that_ends_its_process_get_the_reason_and_run_once(api: Installation) -> None:
    calls = Path(api.get("doubler")["spec"]["handler"]["config"]["calls"])
    calls.unlink(missing_ok=True)

    replies = send_together(api, [*range(31), "segfault"])

    failed = [reply for reply in replies if reply.status != 200]
    assert failed[-1] is replies[31]
    assert {reply.status for reply in failed} <= {500, 503}
    assert all("died" in reply.json["error"] and "segmentation fault" in reply.json["error"] for reply in failed)
    run = calls.read_text().split()
    assert len(run) == len(set(run))
    assert api.post("/doubler", 4).json["doubled"] == 8
