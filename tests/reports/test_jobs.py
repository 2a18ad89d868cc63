"""Reports about jobs: capacity, order, completion."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.processes.limits import usable_processors
from harness.installations.installation import ECHO_SOURCE, Installation
from harness.installations.reports import Report, ReportedApi, deployed_report

#: APIs with jobs of their own, beside replicas that ask for more cores than the machine has.
_OVERCOMMITTED = f"""
    - {{name: t, kind: BatchAPI, handler: {{type: python, path: handler.py}}}}
    - {{name: u, kind: BatchAPI, handler: {{type: python, path: handler.py}}}}
    - name: all
      kind: RealtimeAPI
      handler: {{type: python, path: served.py}}
      compute: {{cpu: {usable_processors()}}}
    - {{name: more, kind: RealtimeAPI, handler: {{type: python, path: served.py}}}}
"""


def _order_of_ends(api: ReportedApi, names: list[str]) -> list[str]:
    """Submit a job to each of `names`, one after the other; return the names in the order in which the jobs ended."""
    client = api.cortex.client
    jobs = [(name, client.submit_job(name, {"workers": 1}, ["item"])["job_id"]) for name in names]
    ends = [(client.wait_job(name, job, 60)["job_status"]["end_time"], name) for name, job in jobs]
    return [name for _, name in sorted(ends)]


def _fill(api: ReportedApi) -> list[tuple[int, bool]]:
    """Send more than the API may have stored, while its first workload runs; return statuses and if errors say why."""
    answers = [api.post("x" * 40_000) for _ in range(3)] + [api.post("x" * 200_000)]
    (api.folder / "go").touch()
    return [(answer.status, b"raise networking.max_stored_size" in answer.body) for answer in answers]


REPORTS = [
    Report(
        "callers of an API store a limited size",
        "X17",
        """
        import os, time

        class Handler:
            def __init__(self, config):
                self.go = config["go"]

            def handle_async(self, payload):
                while not os.path.exists(self.go):
                    time.sleep(0.01)
                return {}
        """,
        _fill,
        [(202, False), (202, False), (503, True), (413, True)],
        config="""
            - name: t
              kind: AsyncAPI
              handler: {type: python, path: handler.py, config: {go: PROJECT/go}}
              networking: {max_stored_size: 100Ki}
        """,
    ),
    Report(
        "jobs of two APIs take turns while replicas hold all cores",
        "J14",
        """
        import time

        class Handler:
            def __init__(self, config): pass
            def handle_batch(self, payload):
                time.sleep(0.3)
        """,
        lambda api: _order_of_ends(api, ["t", "u", "t", "t"])[:2],
        ["t", "u"],
        config=_OVERCOMMITTED,
        files={"served.py": textwrap.dedent(ECHO_SOURCE).encode()},
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    config = report.config.replace("PROJECT", str(tmp_path / "project"))
    with deployed_report(replace(report, config=config), cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
