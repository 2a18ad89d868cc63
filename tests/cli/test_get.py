"""The table of `cortex get`."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.cli.tables.apis import apis_table, previous_version_note, targets_table
from cortex.lifecycle import ApiKind
from harness.jobs.job_data import BEGAN as NOW
from harness.jobs.job_data import api


@pytest.mark.parametrize(
    ("average_ms", "shown"),
    [(None, "-"), (0.0, "<1 ms"), (0.7, "<1 ms"), (1.0, "1 ms"), (301.4, "301 ms"), (1234.5, "1.2 s")],
)
def test_the_average_request_duration_is_formatted_briefly(average_ms: float | None, shown: str) -> None:
    headers, (row,) = apis_table(ApiKind.REALTIME, "local", [api(metrics={"average_ms": average_ms})], NOW)
    assert dict(zip(headers, row, strict=True))["avg request"] == shown


@pytest.mark.parametrize(
    ("updated", "stale", "metrics", "note"),
    [
        (0, 1, {"requests": {}}, "the previous version still serves requests, at http://127.0.0.1:8888/iris"),
        (1, 1, {"requests": {}}, "the previous version still serves a part of the requests"),
        (0, 0, {"requests": {}}, ""),
        (0, 1, {}, ""),  # the gateway does not run, so all requests fail
    ],
)
def test_the_previous_version_is_mentioned_while_it_serves(
    updated: int, stale: int, metrics: dict[str, Any], note: str
) -> None:
    counts = {"requested": 2, "updated": {"ready": updated}, "stale": {"ready": stale}}
    failing = api("iris", metrics=metrics, status={"message": "error", "replica_counts": counts})
    assert previous_version_note(failing) == note


def test_columns_of_failures_are_shown_only_with_failures() -> None:
    working, failing = api(metrics={"requests": {"2xx": 1}}), api(metrics={"requests": {"5xx": 1}})
    assert "5XX" not in apis_table(ApiKind.REALTIME, "local", [working], NOW)[0]
    assert "5XX" in apis_table(ApiKind.REALTIME, "local", [working, failing], NOW)[0]


def test_async_apis_show_workloads_instead_of_requests() -> None:
    shown = api("iris", metrics={"requests": {"2xx": 7}}, open_workloads=3)
    headers, (row,) = apis_table(ApiKind.ASYNC, "local", [shown], NOW)
    assert headers == ["env", "async api", "status", "up-to-date", "requested", "last update", "workloads"]
    assert row == ["local", "iris", "live", "1", "1", "0s", "3"]


SPLITTER = api(
    spec={
        "name": "both",
        "apis": [
            {"name": "old", "weight": 70, "shadow": False},
            {"name": "iris", "weight": 30, "shadow": False},
            {"name": "new", "weight": 5, "shadow": True},
        ],
    },
)


def test_a_traffic_splitter_is_shown_with_its_weights() -> None:
    assert apis_table(ApiKind.SPLITTER, "local", [SPLITTER], NOW) == (
        ["env", "traffic splitter", "apis", "last update"],
        [["local", "both", "old:70 iris:30 new:5 (shadow)", "0s"]],
    )


def test_the_apis_of_a_traffic_splitter_are_shown_with_their_requests() -> None:
    iris = api("iris", metrics={"requests": {"2xx": 4, "5xx": 1}})
    headers, rows = targets_table("local", SPLITTER, [iris, SPLITTER], NOW)
    assert headers == ["env", "apis", "weights", "status", "requested", "last update", "avg request", "2XX", "5XX"]
    assert rows == [["local", "iris", "30", "live", "1", "0s", "-", "4", "1"]]
