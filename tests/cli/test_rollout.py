"""The progress of an update on a terminal."""

from __future__ import annotations

import pytest

from cortex.cli.rollout import progress_line

STATUS = {"message": "updating", "replica_counts": {"requested": 1, "updated": {"ready": 0}}}


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (3.0, "llm: updating, 0 of 1 ready, 3 s"),
        (12.0, "llm: updating, 0 of 1 ready, 12 s; `cortex logs llm` shows its output"),
    ],
)
def test_the_progress_of_a_slow_update_names_the_logs(seconds: float, line: str) -> None:
    assert progress_line("llm", STATUS, seconds) == line
