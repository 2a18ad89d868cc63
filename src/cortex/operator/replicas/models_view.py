"""Puts together what the replicas of one API say about their models, which may differ while one is reloading. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from cortex.models.spec import ModelProblem
from cortex.replica.spec import ModelsStatus, ReplicaStatus, ServedVersion

Json = dict[str, Any]
_Key = tuple[str, str]


def describe_models(replicas: Iterable[ReplicaStatus]) -> Json | None:
    """Return what `cortex get` shows of an API's models; None if no replica has any to tell of.

    Counts are of replicas. Where a version has different contents in different replicas, the newest one counts.
    """
    statuses = [replica.models for replica in replicas if replica.models is not None]
    if not statuses:
        return None
    return {
        "replicas": len(statuses),
        "reloading": sum(status.is_loading for status in statuses),
        "version_count": max(status.version_count for status in statuses),
        "versions": _versions(statuses),
        "problems": _problems(statuses),
    }


def as_metadata(models: Json) -> Json:
    """Return the older form of the same: each model's versions and when they were changed, UNIX seconds."""
    metadata: dict[str, Json] = {}
    for version in models["versions"]:
        model = metadata.setdefault(version["model"], {"versions": [], "timestamps": []})
        model["versions"].append(version["version"])
        model["timestamps"].append(int(datetime.fromisoformat(version["edited_at"]).timestamp()))
    return metadata


def _versions(statuses: Sequence[ModelsStatus]) -> list[Json]:
    by_key: dict[_Key, list[ServedVersion]] = {}
    for status in statuses:
        for version in status.versions:
            by_key.setdefault((version.model, version.version), []).append(version)
    rows = [_version(by_key[key]) for key in sorted(by_key, key=lambda key: (key[0], int(key[1])))]
    latest = {row["model"]: row for row in rows if row["latest"]}  # of several, the highest: the last
    return [{**row, "is_latest": row is latest.get(row["model"])} for row in rows]


def _version(told: Sequence[ServedVersion]) -> Json:
    newest = max(told, key=lambda version: (version.modified_at, version.digest))
    same = [version for version in told if version.digest == newest.digest]
    return {
        "model": newest.model,
        "version": newest.version,
        "edited_at": _time(newest.modified_at),
        "served": len(same),
        "loaded": sum(version.is_loaded for version in same),
        "latest": sum(version.is_latest for version in told),
    }


def _problems(statuses: Sequence[ModelsStatus]) -> list[Json]:
    by_key: dict[tuple[str, str | None, str], list[ModelProblem]] = {}
    for status in statuses:
        for problem in status.problems:
            by_key.setdefault((problem.model, problem.version, problem.message), []).append(problem)
    return [
        {
            "model": model,
            "version": version,
            "since": _time(min(found)) if (found := [item.since for item in told if item.since]) else None,
            "message": message,
            "detail": next((item.detail for item in told if item.detail), ""),
            "replicas": len(told),
        }
        for (model, version, message), told in by_key.items()
    ]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat()
