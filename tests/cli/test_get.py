"""The table of `cortex get`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from cortex.cli.commands.get import table

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def api(**metrics: Any) -> dict[str, Any]:
    counts = {"requested": 1, "updated": {"ready": 1}, "stale": {"ready": 0}}
    return {
        "spec": {"name": "iris"},
        "status": {"message": "live", "replica_counts": counts},
        "metrics": metrics,
        "last_updated": NOW.isoformat(),
    }


@pytest.mark.parametrize(
    ("average_ms", "shown"),
    [(None, "-"), (0.0, "<1 ms"), (0.7, "<1 ms"), (1.0, "1 ms"), (301.4, "301 ms"), (1234.5, "1.2 s")],
)
def test_the_average_duration_of_requests_is_short(average_ms: float | None, shown: str) -> None:
    headers, (row,) = table("local", [api(average_ms=average_ms)], NOW)
    assert dict(zip(headers, row, strict=True))["avg request"] == shown


def test_columns_of_failures_are_there_only_with_failures() -> None:
    assert "5XX" not in table("local", [api(requests={"2xx": 1})], NOW)[0]
    assert "5XX" in table("local", [api(requests={"2xx": 1}), api(requests={"5xx": 1})], NOW)[0]
