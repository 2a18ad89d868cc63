"""Deaths of user code and slow clients, through a real installation.

Under load: updates and kills of the operator are in `tests/operator/test_main.py`, kills of supervisors in
`test_killed_supervisors.py`, kills of workers in `test_numbers.py`. Kills of the gateway are in
`tests/gateway/test_gateway_recovery.py`; calls that are stuck, and limits that change, in
`tests/supervisor/test_supervisor.py`.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.installations.installation import Installation, write_project
from harness.wait import wait_until

HANDLER = """
    import ctypes, os, time

    class Handler:
        def __init__(self, config):
            self.hoard = []

        def handle_post(self, payload):
            do = payload.get("do")
            if do == "exit":
                os._exit(3)
            elif do == "null dereference":
                ctypes.string_at(0)
            elif do == "sleep":
                time.sleep(payload["s"])
            elif do == "wait":
                open(payload["started"], "w").close()
                while not os.path.exists(payload["end"]):
                    time.sleep(0.01)
            elif do == "allocate":
                for _ in range(100):
                    self.hoard.append(b"x" * 10_000_000)
                    time.sleep(0.02)
                time.sleep(60)  # the limit is checked at intervals
            return {"pid": os.getpid()}
"""

CONFIG = """
    - name: {api}
      kind: RealtimeAPI
      handler:
        type: python
        path: handler.py
      networking:
        timeout: {timeout}
      autoscaling:
        min_replicas: {replicas}
      compute:
        mem_limit: 400Mi
"""


def deploy(cortex: Installation, folder: Path, api: str, replicas: int = 2, timeout: str = "60s") -> None:
    config = CONFIG.format(api=api, replicas=replicas, timeout=timeout)
    write_project(folder, HANDLER, config)
    cortex.cortex("deploy", folder)


def all_answered(summary: dict[str, Any]) -> None:
    assert set(summary["statuses"]) == {"200"}, summary


def pause(seconds: float) -> None:
    """Let a load run for a while; the test is that it is not disturbed."""
    threading.Event().wait(seconds)


def test_deaths_in_requests_fail_these_requests_alone(cortex: Installation, tmp_path: Path) -> None:
    deploy(cortex, tmp_path, "dying")
    with cortex.load("/dying", 200) as summary:
        pause(0.3)
        deaths = {do: cortex.post("/dying", {"do": do}) for do in ("exit", "null dereference", "allocate")}
        pause(0.5)
    for reply, words in zip(
        deaths.values(), ("exited with code 3", "segmentation fault", "out of memory"), strict=True
    ):
        assert reply.status == 500
        assert words in reply.json["error"]
        assert reply.json["request_id"] == reply.headers["x-cortex-request-id"]
    all_answered(summary)


def test_no_call_waits_behind_a_long_one_while_another_replica_is_idle(cortex: Installation, tmp_path: Path) -> None:
    deploy(cortex, tmp_path, "uneven", replicas=2)
    started, end = tmp_path / "started", tmp_path / "end"
    with ThreadPoolExecutor(9) as pool:
        long = pool.submit(cortex.post, "/uneven", {"do": "wait", "started": str(started), "end": str(end)})
        wait_until(started.exists)
        answers = list(pool.map(lambda _: cortex.post("/uneven", {"do": "sleep", "s": 0.01}), range(40)))
        assert {answer.status for answer in answers} == {200}
        end.touch()
        assert long.result().json["pid"] not in {answer.json["pid"] for answer in answers}


def test_timeout_of_a_slow_upload_starts_at_its_end(cortex: Installation, tmp_path: Path) -> None:
    deploy(cortex, tmp_path, "uploaded", replicas=1, timeout="3s")
    with socket.create_connection(("127.0.0.1", cortex.gateway_port)) as client:
        body = b'{"x": "' + b"x" * 91 + b'"}'
        head = b"POST /uploaded HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        client.sendall(head + body[:10])
        pause(3.5)
        client.sendall(body[10:])
        client.settimeout(60)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
