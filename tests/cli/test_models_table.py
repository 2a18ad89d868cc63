from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cortex.cli.tables.models import model_notes, versions_table

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def row(version: str = "1", model: str = "iris", **changes: Any) -> dict[str, Any]:
    base = {"model": model, "version": version, "edited_at": "2026-01-01T12:00:00+00:00"}
    return {**base, "served": 3, "loaded": 3, "latest": 0, "is_latest": False, **changes}


def models(*versions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    base = {"replicas": 3, "reloading": 0, "version_count": len(versions), "problems": []}
    return {**base, "versions": list(versions), **changes}


def problem(**changes: Any) -> dict[str, Any]:
    since = (NOW - timedelta(minutes=3)).isoformat()
    base = {
        "model": "iris",
        "version": "3",
        "since": since,
        "message": "no saved_model.pb",
        "detail": "",
        "replicas": 3,
    }
    return {**base, **changes}


def test_versions_are_listed_with_latest_and_loaded() -> None:
    headers, rows = versions_table(models(row("1", loaded=0), row("2", latest=3)))
    assert headers == ["model name", "model version", "edit time", "loaded"]
    assert rows == [
        ["iris", "1", "2026-01-01 12:00:00 UTC", "no"],
        ["iris", "2 (latest)", "2026-01-01 12:00:00 UTC", "yes"],
    ]


def test_replicas_that_differ_are_counted() -> None:
    _, (old, new) = versions_table(models(row("1", latest=1), row("2", latest=2, loaded=2)))
    assert old[1] == "1 (latest in 1 of 3 replicas)"
    assert new[1::2] == ["2 (latest in 2 of 3 replicas)", "2 of 3 replicas"]


def test_unnamed_models_have_no_name_column() -> None:
    headers, rows = versions_table(models(row(model="_cortex_default")))
    assert headers[0] == "model version"
    assert rows[0][0] == "1"


def test_a_problem_line_contains_model_time_replicas_and_reason() -> None:
    lines = list(model_notes(models(problems=[problem(replicas=2, detail="Traceback\n  here\n")]), NOW))
    assert lines[0] == "problem with iris version 3, for 3m, in 2 of 3 replicas: no saved_model.pb"
    assert lines[1:] == ["    Traceback", "      here"]


def test_a_problem_of_all_models_contains_no_model_name() -> None:
    (line,) = model_notes(
        models(problems=[problem(model="", version=None, since=None, message="can't be listed")]), NOW
    )
    assert line == "problem with models: can't be listed"


def test_omitted_rows_are_counted_below_the_table() -> None:
    assert list(model_notes(models(row(), version_count=4701, reloading=1), NOW)) == [
        "and 4,700 more versions",
        "newer models are being loaded in 1 of 3 replicas",
    ]
