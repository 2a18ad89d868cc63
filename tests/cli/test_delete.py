"""Questions of `cortex delete`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.installations.command_line import cortex
from harness.installations.terminal import on_terminal
from harness.jobs.job_data import api
from harness.jobs.job_operator import Operator

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def deletions(operator: Operator) -> None:
    for query in ("keep_cache=false&force=false", "keep_cache=true&force=false", "keep_cache=false&force=true"):
        operator.respond(f"DELETE /v1/apis/sum?{query}", {"api": "sum", "message": "deleting sum"})


@pytest.mark.parametrize(
    ("described", "options", "question"),
    [
        (api(), [], "sum has 1 ready replica; delete it? [y/N]"),
        (api(ready=0), [], "sum is live; delete it? [y/N]"),
        (
            api(ready=0, batch_job_statuses=[{}], running_jobs=2),
            [],
            "sum is live and has jobs, 2 of them running, which will be deleted with their results; delete it? [y/N]",
        ),
        (api(ready=0, task_job_statuses=[{}]), ["-c"], "sum is live and has jobs; delete it? [y/N]"),
        (api(ready=2, open_workloads=1), [], "sum has 2 ready replicas and has 1 unfinished workload; delete it?"),
    ],
)
def test_asks_on_a_terminal_before_it_deletes_an_api_that_is_in_use(
    operator: Operator, home: Path, described: dict[str, Any], options: list[str], question: str
) -> None:
    operator.respond("GET /v1/apis/sum", described)
    shown = on_terminal(home, "delete", "sum", *options, typed="n\n")
    assert question in shown
    assert "nothing was deleted" in shown
    assert "deleting sum" in on_terminal(home, "delete", "sum", *options, typed="y\n")


def test_does_not_ask_if_nothing_is_in_use_or_with_force_or_without_a_terminal(operator: Operator, home: Path) -> None:
    operator.respond("GET /v1/apis/sum", api(ready=0, code="error"), api())
    assert on_terminal(home, "delete", "sum").splitlines() == ["deleting sum"]
    assert on_terminal(home, "delete", "sum", "--force").splitlines() == ["deleting sum"]
    assert cortex(home, "delete", "sum").stdout == "deleting sum\n"
