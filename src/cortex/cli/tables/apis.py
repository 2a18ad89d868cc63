"""Tables of APIs by kind, of the memory of their replicas, and of the APIs behind a TrafficSplitter."""

from __future__ import annotations

from datetime import datetime

from cortex.cli.output import Column, Table, build_table, format_age, format_average
from cortex.cli.tables.canary import is_tried
from cortex.errors import format_size
from cortex.lifecycle import ApiKind
from cortex.payloads.json_object import Json


def kind_of(api: Json) -> ApiKind:
    """Return the kind of an API; a kind of a newer operator counts as a RealtimeAPI."""
    try:
        return ApiKind(api["spec"].get("kind", ApiKind.REALTIME))
    except ValueError:
        return ApiKind.REALTIME


def apis_table(kind: ApiKind, env: str, apis: list[Json], now: datetime) -> Table:
    """Return a table with one row per API of this kind. Columns of failures are hidden while there are none."""
    headers, rows = build_table(_COLUMNS[kind], apis, now)
    return ["env", *headers], [[env, *row] for row in rows]


def targets_table(env: str, splitter: Json, apis: list[Json], now: datetime) -> Table:
    """Return a table with one row per target of a splitter, in its order. `apis` are all deployed APIs."""
    deployed = {api["spec"]["name"]: api for api in apis}
    rows = [
        {**deployed[target["name"]], "weight": _weight(target)}
        for target in splitter["spec"]["apis"]
        if target["name"] in deployed
    ]
    headers, cells = build_table(_TARGET_COLUMNS, rows, now)
    return ["env", *headers], [[env, *row] for row in cells]


def memory_table(memory: list[Json]) -> Table:
    """Return a table with one row per replica: a page that its processes share counts once, and under `shared`."""
    headers = ["replica", "memory", "shared", "private"]
    columns = ("proportional_bytes", "shared_bytes", "private_bytes")
    return headers, [[each["replica"], *(format_size(each[column]) for column in columns)] for each in memory]


def previous_version_note(api: Json) -> str:
    """Return a line about replicas of older revisions that still serve requests; empty if none does.

    Replicas serve only through the gateway, which has metrics while it runs.
    """
    counts = _counts(api)
    if not counts["stale"]["ready"] or not api["metrics"]:
        return ""
    if counts["updated"]["ready"]:
        return "the previous version still serves a part of the requests"
    return f"the previous version still serves requests, at {api['endpoint']}"


def _name(api: Json, now: datetime) -> str:
    return str(api["spec"]["name"])


def _status(api: Json, now: datetime) -> str:
    message, canary = str(api["status"]["message"]), api.get("canary") or {}
    if not is_tried(api):
        return message
    share = "copies" if canary.get("shadow") else f"{canary['percent']} %"
    share = share if _counts(api)["updated"]["ready"] else "not ready"
    return f"{message}, canary: {share}"


def _last_update(api: Json, now: datetime) -> str:
    return format_age(datetime.fromisoformat(api["last_updated"]), now)


def _average(api: Json, now: datetime) -> str:
    return format_average(api["metrics"].get("average_ms"))


def _counts(api: Json) -> Json:
    counts: Json = api["status"]["replica_counts"]
    return counts


def _failed(api: Json) -> int:
    updated = _counts(api)["updated"]
    return sum(int(updated.get(name, 0)) for name in ("failed", "killed", "killed_oom"))


def _responses(api: Json, status_class: str) -> int:
    return int(api["metrics"].get("requests", {}).get(status_class, 0))


def _targets(splitter: Json) -> str:
    return " ".join(f"{target['name']}:{_weight(target)}" for target in splitter["spec"]["apis"])


def _weight(target: Json) -> str:
    return f"{target['weight']}{' (shadow)' if target['shadow'] else ''}"


_LAST_UPDATE: Column = ("last update", _last_update, None)
_AVERAGE: Column = ("avg request", _average, None)
_REQUESTED: Column = ("requested", lambda api, now: str(_counts(api)["requested"]), None)
_2XX: Column = ("2XX", lambda api, now: str(_responses(api, "2xx") or "-"), None)
_5XX: Column = ("5XX", lambda api, now: str(_responses(api, "5xx")), "0")
_REPLICAS: tuple[Column, ...] = (
    ("status", _status, None),
    ("up-to-date", lambda api, now: str(_counts(api)["updated"]["ready"]), None),
    ("stale", lambda api, now: str(_counts(api)["stale"]["ready"]), "0"),
    _REQUESTED,
    ("failed", lambda api, now: str(_failed(api)), "0"),
    _LAST_UPDATE,
)
#: For BatchAPIs and TaskAPIs, whose status is shown only while it is not `live`.
_JOBS: tuple[Column, ...] = (
    ("status", _status, "live"),
    ("running jobs", lambda api, now: str(api.get("running_jobs", 0)), None),
    ("latest job id", lambda api, now: str(api.get("latest_job_id") or "-"), None),
    _LAST_UPDATE,
)
_COLUMNS: dict[ApiKind, tuple[Column, ...]] = {
    ApiKind.REALTIME: (
        ("realtime api", _name, None),
        *_REPLICAS,
        _AVERAGE,
        _2XX,
        ("4XX", lambda api, now: str(_responses(api, "4xx")), "0"),
        _5XX,
        ("aborted", lambda api, now: str(api["metrics"].get("aborted", 0)), "0"),
    ),
    # The metrics of an AsyncAPI's requests are omitted: they do not measure its work.
    ApiKind.ASYNC: (
        ("async api", _name, None),
        *_REPLICAS,
        ("workloads", lambda api, now: str(api.get("open_workloads") or 0), None),
    ),
    ApiKind.BATCH: (("batch api", _name, None), *_JOBS),
    ApiKind.TASK: (("task api", _name, None), *_JOBS),
    ApiKind.SPLITTER: (
        ("traffic splitter", _name, None),
        ("apis", lambda api, now: _targets(api), None),
        _LAST_UPDATE,
    ),
}
_TARGET_COLUMNS: tuple[Column, ...] = (
    ("apis", _name, None),
    ("weights", lambda api, now: str(api["weight"]), None),
    ("status", _status, None),
    _REQUESTED,
    _LAST_UPDATE,
    _AVERAGE,
    _2XX,
    _5XX,
)
