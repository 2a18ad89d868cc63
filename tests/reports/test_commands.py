"""Reports about servers of the user's own: their addresses, their readiness, responses that break off."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from harness.installations.installation import Installation
from harness.installations.reports import Report, ReportedApi, deployed_report
from harness.wait import PATIENCE_S, wait_until

TWO_SERVERS = """
    - name: t
      kind: RealtimeAPI
      handler: {type: command, command: [python, handler.py, $PORT], processes_per_replica: 2}
      readiness: /health
"""

ONE_SERVER = """
    - name: t
      kind: RealtimeAPI
      handler: {type: command, command: [python, handler.py, $PORT]}
      networking: {timeout: 1s}
"""

#: After a POST, its health is bad and every request fails at once.
ENGINE = """
    import http.server, os, sys

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        status = 200
        def do_GET(self):
            self.send_response(Answers.status)
            self.send_header("content-length", "0")
            self.end_headers()
        def do_POST(self):
            self.do_GET()
            Answers.status = 503 if self.path == "/die" else Answers.status
        def log_message(self, *args):
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def dead_engines(api: ReportedApi) -> dict[str, object]:
    """Return what is observed after the engine of one server has died, and after that of both."""

    def statuses(count: int) -> set[int]:
        return {api.post(method="GET", path="/work").status for _ in range(count)}

    def is_live() -> bool:
        return api.cortex.get("t")["status"]["status_code"] == "live"

    found: dict[str, object] = {"before": (statuses(8), is_live())}
    api.post(path="/die")
    wait_until(lambda: not is_live(), 60, "one server is not ready")
    wait_until(lambda: statuses(16) == {200}, 60, "the other one gets all requests")
    found["one is dead"] = api.cortex.cortex("status", "--ready", check=False).returncode != 0
    api.post(path="/die")
    answer = wait_until(lambda: (answer := api.post(path="/work")).body and answer, 60)  # not that of the server
    assert answer
    found["both are dead"] = (answer.status, answer.json["error"])
    found["cause"] = "the command is not ready: GET /health answered 503" in api.cortex.cortex("get", "t").stdout
    found["ready"] = api.cortex.get("t")["status"]["replica_counts"]["updated"]["ready"]
    return found


#: Answers without a length or chunks, and ends the connection as the path says after a request for `/end`.
UNFRAMED = """
    import os, signal, socket, struct, sys, threading

    end = threading.Event()

    def begin(connection):
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nconnection: close\\r\\n\\r\\n")
        for number in range(3):
            connection.sendall(b"data: %d\\n\\n" % number)

    def wait():
        end.wait()
        end.clear()

    def serve_in_a_worker(connection, path):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)  # the parent has closed its copy of the connection
            begin(connection)
            os.read(reader, 1)
            if path == "/worker-close":
                connection.close()
                signal.pause()
            os._exit(0)
        connection.close()
        os.write(writer, b"1")
        wait()
        if path == "/worker-kill":
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(writer)

    def serve(connection):
        path = connection.recv(65536).split()[1].decode()
        if path == "/end":
            end.set()
            connection.close()
            return
        if path.startswith("/worker"):
            serve_in_a_worker(connection, path)
            return
        begin(connection)
        if path == "/silence":
            threading.Event().wait()
        wait()
        if path == "/kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif path == "/exit":
            os._exit(3)
        elif path == "/reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
ENDS = {
    "close": "whole",
    "worker-close": "whole",
    "worker-exit": "whole",
    "worker-kill": "broken",
    "reset": "broken",
    "silence": "broken",
    "exit": "broken",
    "kill": "broken",
}


def end_of(api: ReportedApi, path: str) -> str:
    """Return how a client sees the end of a response."""
    request = f"GET /t/{path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode()
    with socket.create_connection((api.cortex.host, api.cortex.gateway_port), PATIENCE_S) as connection:
        connection.sendall(request)
        response = b""
        while b"data: 2" not in response:
            response += connection.recv(65536)
        if path != "silence":
            api.post(method="GET", path="/end")
        response += b"".join(iter(lambda: connection.recv(65536), b""))
    return "whole" if response.endswith(b"0\r\n\r\n") else "broken"


REPORTS = [
    Report(
        "a response that lasts until the connection ends is broken off if the server dies",
        "text-generation-inference#2668",
        UNFRAMED,
        lambda api: {path: end_of(api, path) for path in ENDS},
        ENDS,
        ONE_SERVER,
    ),
    Report(
        "a server whose engine is dead gets no requests, and its API is not live",
        "vllm#19881",
        ENGINE,
        dead_engines,
        {
            "before": ({200}, True),
            "one is dead": True,
            "both are dead": (503, "no replica is ready: it is not ready; `cortex get t` shows why"),
            "cause": True,
            "ready": 0,
        },
        TWO_SERVERS,
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    with deployed_report(report, cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
