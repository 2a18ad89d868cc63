"""Status of an API: status code, replica counts, failure, and the models that its replicas serve. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta

from cortex.lifecycle import ApiKind, ApiStatus, DeathCause, ProcessState
from cortex.models.spec import ModelProblem
from cortex.operator.replicas.plan import Replica, canary_replicas, is_proven, wanted_replicas
from cortex.operator.revisions.capacity import DeviceCapacity
from cortex.operator.revisions.preparation_states import Preparation, Stage
from cortex.payloads.json_object import Json
from cortex.state.queries.apis import ApiRecord
from cortex.worker.spec import ModelsStatus, ProcessStatus, ReplicaStatus, ServedVersion, StartFailure

#: Time that replicas may wait for capacity before the API counts as stalled.
STALLED_AFTER = timedelta(minutes=10)


@dataclass(frozen=True)
class ReplicaCounts:
    """Numbers of replicas by state."""

    pending: int = 0  #: not started yet
    initializing: int = 0
    ready: int = 0
    terminating: int = 0
    failed: int = 0
    killed: int = 0
    killed_oom: int = 0
    stalled: int = 0


@dataclass(frozen=True)
class ApiState:
    """Status of an API."""

    status: ApiStatus
    requested: int
    updated: ReplicaCounts = field(default_factory=ReplicaCounts)  #: replicas of the newest revision
    stale: ReplicaCounts = field(default_factory=ReplicaCounts)  #: replicas of older revisions
    failure: StartFailure | None = None
    waits_for: str = ""  #: why a process that starts is not ready yet, if it has reported that

    @property
    def ready(self) -> int:
        """Number of ready replicas of any revision."""
        return self.updated.ready + self.stale.ready

    def to_json(self) -> Json:
        """Return the value of `status` in `cortex get -o json`."""
        failure = self.failure
        return {
            "status_code": self.status.value,
            "message": self.status.message,
            "replica_counts": {
                "requested": self.requested,
                "updated": asdict(self.updated),
                "stale": asdict(self.stale),
            },
            "failure": {"message": failure.message, "traceback": failure.traceback} if failure else None,
            "waits_for": self.waits_for,
        }


def status_of(
    record: ApiRecord,
    replicas: Sequence[Replica],
    terminating: Iterable[Replica],
    preparation: Preparation,
    now: datetime,
    canary_percent: int | None = None,
) -> ApiState:
    """Return the state of an API. `replicas` are its running replicas without those in `terminating`.

    `canary_percent` is the share of the newest revision while it is tried; it then needs fewer replicas.
    """
    requested = wanted_replicas(record)
    if canary_percent is not None:
        requested = canary_replicas(requested, canary_percent)
    leaving = [replica.spec.revision == record.revision for replica in terminating]
    new = [replica for replica in replicas if replica.spec.revision == record.revision]
    stale = _count((r for r in replicas if r.spec.revision != record.revision), terminating=leaving.count(False))
    updated = _count(new, terminating=leaving.count(True))
    missing = max(0, requested - len(new))
    shortage = preparation.shortage if missing and preparation.stage is Stage.DONE else ""
    waiting = next((replica.status.lack for replica in new if replica.status.lack), "")
    if shortage or (missing and _is_stalled(record, new, preparation, now)):
        updated = _with(updated, stalled=missing)
    else:
        updated = _with(updated, pending=missing)
    if not record.spec.kind.has_replicas:
        return _jobs_api(record, preparation)
    failure = None if updated.ready >= requested else failure_of(record, new, preparation)
    status = _code(record, updated, requested, failure)
    if status is ApiStatus.STALLED and (shortage or waiting):
        failure = StartFailure(shortage or waiting)
    waits = (process.waits_for for replica in new for process in replica.status.processes)
    return ApiState(status, requested, updated, stale, failure, next(filter(None, waits), ""))


def through_gateway(state: ApiState, is_late: bool, failure: str) -> ApiState:
    """Return the state of an API for its callers: a ready API is not live before its routes are in force.

    `is_late` is set if the newest routes are not in force in time, or if no route leads to the API yet; `failure` is
    the reason why they can't be.
    """
    if state.status is not ApiStatus.LIVE or not (is_late or failure):
        return state
    if failure:
        reason = StartFailure(f"the gateway can't apply its new routes: {failure}")
        return replace(state, status=ApiStatus.ERROR, failure=reason)
    return replace(state, status=ApiStatus.UPDATING)


def _jobs_api(record: ApiRecord, preparation: Preparation) -> ApiState:
    """Return the state of an API without replicas, which is live once job workers could start."""
    if preparation.stage is Stage.DONE or record.spec.kind is ApiKind.SPLITTER:
        return ApiState(ApiStatus.LIVE, 0)
    failure = failure_of(record, (), preparation)
    return ApiState(ApiStatus.ERROR if failure else ApiStatus.UPDATING, 0, failure=failure)


def shortage_of(record: ApiRecord, replicas: Sequence[Replica], capacity: DeviceCapacity) -> str:
    """Describe the devices that the next replica lacks even without all replicas of older revisions; empty if none.

    `replicas` are the active replicas of all APIs; `capacity` is what they leave free.
    """
    mine = [replica for replica in replicas if replica.spec.api == record.name]
    old = [replica for replica in mine if replica.spec.revision != record.revision]
    if len(mine) - len(old) >= wanted_replicas(record):
        return ""
    for replica in old:
        capacity = capacity.release(replica.spec)
    return capacity.shortage(record.spec.compute)


def failure_of(record: ApiRecord, replicas: Iterable[Replica], preparation: Preparation) -> StartFailure | None:
    """Return why the newest revision can't become ready, or None. `replicas` are the replicas of that revision."""
    if preparation.failure:
        return preparation.failure
    failed = [process for replica in replicas for process in replica.status.processes if _failed(process)]
    for process in failed:
        if process.failure:
            return process.failure
    for process in failed:
        if process.death:
            return StartFailure(process.death.message, summary=process.death.message)
    if record.failure:
        return StartFailure(record.failure.message, record.failure.traceback)
    return None


def describe_models(replicas: Iterable[ReplicaStatus]) -> Json | None:
    """Merge the models of an API's replicas for `cortex get`; None if no replica reports models.

    Replicas may differ while one of them reloads. All numbers count replicas. If replicas have different contents of
    one version, the newest contents count.
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
    """Convert to the legacy format: each model's versions and modification times in UNIX seconds."""
    metadata: dict[str, Json] = {}
    for version in models["versions"]:
        model = metadata.setdefault(version["model"], {"versions": [], "timestamps": []})
        model["versions"].append(version["version"])
        model["timestamps"].append(int(datetime.fromisoformat(version["edited_at"]).timestamp()))
    return metadata


def _code(record: ApiRecord, updated: ReplicaCounts, requested: int, failure: StartFailure | None) -> ApiStatus:
    if updated.ready >= requested:
        return ApiStatus.LIVE
    if updated.killed_oom and not updated.failed and not updated.killed:
        return ApiStatus.OOM
    if failure or updated.failed or updated.killed:
        return ApiStatus.ERROR
    if updated.stalled:
        return ApiStatus.STALLED
    # A revision that never served must become ready once, even if it needs no replica afterwards.
    fewest = max(record.spec.autoscaling.min_replicas, int(not is_proven(record)))
    if updated.ready >= fewest:
        return ApiStatus.LIVE
    return ApiStatus.UPDATING


def _is_stalled(record: ApiRecord, new: Sequence[Replica], preparation: Preparation, now: datetime) -> bool:
    starting = any(not replica.is_ready for replica in new)
    waiting = preparation.stage is not Stage.RUNNING and preparation.failure is None
    return waiting and not starting and now - record.updated_at > STALLED_AFTER


def _count(replicas: Iterable[Replica], terminating: int) -> ReplicaCounts:
    counts = ReplicaCounts(terminating=terminating)
    for replica in replicas:
        name = _bucket(replica)
        counts = _with(counts, **{name: getattr(counts, name) + 1})
    return counts


def _bucket(replica: Replica) -> str:
    if replica.is_ready:
        return "ready"
    if replica.status.lack:
        return "stalled"
    failed = [process for process in replica.status.processes if _failed(process)]
    if not failed:
        return "initializing"
    causes = {process.death.cause for process in failed if process.death and not process.failure}
    if DeathCause.OUT_OF_MEMORY in causes:
        return "killed_oom"
    return "killed" if causes and causes <= {DeathCause.KILLED, DeathCause.SIGNALLED} else "failed"


def _failed(process: ProcessStatus) -> bool:
    """Return whether the last start failed, or the process is not ready any more."""
    is_unready = process.state is ProcessState.STARTING and process.failure is not None
    return process.failed_starts > 0 or process.state is ProcessState.BACKING_OFF or is_unready


def _with(counts: ReplicaCounts, **changes: int) -> ReplicaCounts:
    return ReplicaCounts(**{**asdict(counts), **changes})


def _versions(statuses: Sequence[ModelsStatus]) -> list[Json]:
    by_key: dict[tuple[str, str], list[ServedVersion]] = {}
    for status in statuses:
        for version in status.versions:
            by_key.setdefault((version.model, version.version), []).append(version)
    rows = [_version(by_key[key]) for key in sorted(by_key, key=lambda key: (key[0], int(key[1])))]
    latest = {row["model"]: row for row in rows if row["latest"]}  # if several claim to be the latest, the highest wins
    return [{**row, "is_latest": row is latest.get(row["model"])} for row in rows]


def _version(reported: Sequence[ServedVersion]) -> Json:
    newest = max(reported, key=lambda version: (version.modified_at, version.digest))
    same = [version for version in reported if version.digest == newest.digest]
    return {
        "model": newest.model,
        "version": newest.version,
        "edited_at": _time(newest.modified_at),
        "served": len(same),
        "loaded": sum(version.is_loaded for version in same),
        "latest": sum(version.is_latest for version in reported),
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
            "since": _time(min(found)) if (found := [item.since for item in problems if item.since]) else None,
            "message": message,
            "detail": next((item.detail for item in problems if item.detail), ""),
            "replicas": len(problems),
        }
        for (model, version, message), problems in by_key.items()
    ]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat()
