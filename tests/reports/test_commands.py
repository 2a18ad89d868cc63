"""Reports about servers of the user's own: their addresses, their readiness, responses that break off."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.installations.installation import Installation
from harness.installations.reports import Report, ReportedApi, deployed_report
from harness.wait import wait_until

TWO_SERVERS = """
    - name: t
      kind: RealtimeAPI
      handler: {type: command, command: [python, handler.py, $PORT], processes_per_replica: 2}
      readiness: /health
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


REPORTS = [
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
