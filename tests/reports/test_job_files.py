"""Reports about jobs: the files that they read and write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.installations.installation import Installation
from harness.installations.reports import Report, ReportedApi, deployed_report
from harness.wait import wait_until

BATCH = """
    - name: t
      kind: BatchAPI
      handler: {type: python, path: handler.py}
      networking: {local_paths: [PROJECT/uploads]}
"""
SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_batch(self, payload):
            return payload
"""


def submit(api: ReportedApi, path: str, output: str) -> tuple[int, str]:
    """Submit a job without a token; return the status, and the result: that of the job, or the error."""
    uploads = api.folder / "uploads"
    source = {"paths": [f"{uploads}/{path}"], "batch_size": 1}
    answer = api.post({"workers": 1, "delimited_files": source, "output": f"{uploads}/{output}"})
    if answer.status != 200:
        return answer.status, answer.body.decode()
    job = answer.json["job_id"]

    def ended() -> Any:
        status = api.cortex.client.get_job("t", job)["job_status"]
        return status if status["status"].startswith(("succeeded", "enqueue_failed")) else None

    return answer.status, str(wait_until(ended))


def follow_links(api: ReportedApi) -> list[bool]:
    """Submit jobs whose input or output is behind a link out of the folder of uploads."""
    (api.folder / "uploads/link").symlink_to(api.folder / "secret")
    secret = [submit(api, path, "out") for path in ("link/", "link/value", "")]
    written = submit(api, "value", "link/out")
    good = submit(api, "value", "out")
    return [
        all("a link leads out of the folder" in text and "4711" not in text for _, text in secret),
        "a link leads out of the folder" in written[1],
        sorted(path.name for path in (api.folder / "secret").iterdir()) == ["value"],
        "succeeded" in good[1],
        bool(list((api.folder / "uploads/out").rglob("part-00000.ndjson"))),
    ]


def lose_results(api: ReportedApi) -> list[Any]:
    """Run a job, of which JSON can't hold some results, with and without an output; return its ends and results."""
    client = api.cortex.client
    ends: list[Any] = []
    for options in ({"output": f"{api.folder}/out", "isolate_failures": True}, {}):
        job_spec = {"workers": 1, "max_attempts": 1, "batch_size": 5, **options}
        job = client.submit_job("t", job_spec, range(1, 6))["job_id"]
        end = client.wait_job("t", job, 60)["job_status"]
        letters = list(client.dead_letters("t", job))
        ends.append([end["status"], [letter["error"] for letter in letters]])
        ends.append(sorted(item for line in client.job_results("t", job) for item in line["result"]))
    return ends


def submit_as_a_page(api: ReportedApi) -> list[bool]:
    """Submit as a web page does, which has no token: nothing may be listed, written or called with the operator's."""
    sources = {"paths": ["s3://private/"], "batch_size": 1}
    items = {"items": [1], "batch_size": 1}
    found = []
    for query, fields in (
        ("?dryRun=true", {"file_path_lister": sources}),
        ("", {"delimited_files": sources}),
        ("", {"item_list": items, "output": "s3://of-the-attacker/loot"}),
        ("", {"item_list": items, "webhook": "http://[::ffff:127.0.0.1]:9/internal"}),
    ):
        sent = {"content_type": "text/plain", "origin": "http://evil.example"}
        answer = api.post({"workers": 1, **fields}, query, **sent)
        found.append(answer.status == 400 and b"not open to this endpoint; use `cortex submit`, or add" in answer.body)
    return found


REPORTS = [
    Report(
        "a result that JSON can't hold fails its item if the job has an output",
        "J16",
        """
        class Handler:
            def __init__(self, config):
                pass

            def handle_batch(self, payload):
                return {*payload} if 3 in payload else payload
        """,
        lose_results,
        [
            ["completed_with_failures", ["result: set is not JSON serializable; return a list: list(value)"]],
            [1, 2, 4, 5],
            ["succeeded", []],
            [],
        ],
        BATCH,
    ),
    Report(
        "callers of an endpoint use neither the credentials nor the network of the operator",
        "X1",
        SOURCE,
        submit_as_a_page,
        [True] * 4,
        BATCH,
    ),
    Report(
        "links out of a folder of uploads are neither read nor written through",
        "X2",
        SOURCE,
        follow_links,
        [True] * 5,
        BATCH,
        {"uploads/value": b"1", "secret/value": b"4711"},
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    config = report.config.replace("PROJECT", str(tmp_path / "project"))
    with deployed_report(replace(report, config=config), cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
