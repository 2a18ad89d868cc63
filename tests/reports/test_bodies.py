"""Reports about the bodies of requests: content types, codings, character sets, forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.installations.installation import ECHO_SOURCE, Installation
from harness.installations.reports import Report, deployed_report

REPORTS = [
    Report(
        "a content type in any case, with a blank, is JSON",
        "bentoml#893",
        ECHO_SOURCE,
        lambda api: api.post(body=b'{"a": 1}', content_type="Application/JSON ; Charset=UTF-8").json,
        {"a": 1},
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    with deployed_report(report, cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
