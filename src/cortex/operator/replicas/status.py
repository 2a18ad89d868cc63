"""Says how an API is: its status code, its replica counts and why it fails. Pure; decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from cortex.lifecycle import ApiKind, ApiStatus, DeathCause, ProcessState
from cortex.operator.replicas.capacity import Room
from cortex.operator.replicas.plan import Preparation, Replica, Stage, is_proven, wanted_replicas
from cortex.replica.spec import Failure, ProcessStatus
from cortex.state.apis import ApiRecord

#: How long replicas may wait for a place to run before the API counts as stalled.
STALLED_AFTER = timedelta(minutes=10)


@dataclass(frozen=True)
class Counts:
    """Replicas by what they do."""

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
    """How an API is."""

    status: ApiStatus
    requested: int
    updated: Counts = field(default_factory=Counts)  #: replicas of the newest revision
    stale: Counts = field(default_factory=Counts)  #: replicas of older ones
    failure: Failure | None = None

    @property
    def ready(self) -> int:
        """Count the replicas that answer, of any revision."""
        return self.updated.ready + self.stale.ready

    def to_json(self) -> dict[str, Any]:
        """Return what `cortex get -o json` shows under `status`."""
        return {
            "status_code": self.status.value,
            "message": self.status.message,
            "replica_counts": {
                "requested": self.requested,
                "updated": asdict(self.updated),
                "stale": asdict(self.stale),
            },
            "failure": asdict(self.failure) if self.failure else None,
        }


def status_of(
    record: ApiRecord,
    replicas: Sequence[Replica],
    terminating: Iterable[Replica],
    preparation: Preparation,
    now: datetime,
) -> ApiState:
    """Return the state of an API. `replicas` are its running ones, less those in `terminating`."""
    requested = wanted_replicas(record)
    leaving = [replica.spec.revision == record.revision for replica in terminating]
    new = [replica for replica in replicas if replica.spec.revision == record.revision]
    stale = _count((r for r in replicas if r.spec.revision != record.revision), terminating=leaving.count(False))
    updated = _count(new, terminating=leaving.count(True))
    missing = max(0, requested - len(new))
    lack = preparation.lack if missing and preparation.stage is Stage.DONE else ""
    waiting = next((replica.status.lack for replica in new if replica.status.lack), "")
    if lack or (missing and _is_stalled(record, new, preparation, now)):
        updated = _with(updated, stalled=missing)
    else:
        updated = _with(updated, pending=missing)
    if not record.spec.kind.has_replicas:
        return _jobs_api(record, preparation)
    failure = None if updated.ready >= requested else failure_of(record, new, preparation)
    status = _code(record, updated, requested, failure)
    if status is ApiStatus.STALLED and (lack or waiting):
        failure = Failure(lack or waiting)
    return ApiState(status, requested, updated, stale, failure)


def seen_through_gateway(state: ApiState, is_late: bool, failure: str) -> ApiState:
    """Return the state of an API as its callers have it: what is ready is not live before its routes are.

    `is_late` says that the newest routes are not in force, `failure` why they can't come to be.
    """
    if state.status is not ApiStatus.LIVE or not (is_late or failure):
        return state
    if failure:
        reason = Failure(f"the gateway can't take its new routes: {failure}")
        return replace(state, status=ApiStatus.ERROR, failure=reason)
    return replace(state, status=ApiStatus.UPDATING)


def _jobs_api(record: ApiRecord, preparation: Preparation) -> ApiState:
    """Return the state of an API that has no replicas: live once workers of jobs could start."""
    if preparation.stage is Stage.DONE or record.spec.kind is ApiKind.SPLITTER:
        return ApiState(ApiStatus.LIVE, 0)
    failure = failure_of(record, (), preparation)
    return ApiState(ApiStatus.ERROR if failure else ApiStatus.UPDATING, 0, failure=failure)


def lack_of(record: ApiRecord, replicas: Sequence[Replica], room: Room) -> str:
    """Say what the next replica is short of, even once all of older revisions are gone; empty if none is missing.

    `replicas` are those that run and stay, of any API; `room` is what they leave.
    """
    mine = [replica for replica in replicas if replica.spec.api == record.name]
    old = [replica for replica in mine if replica.spec.revision != record.revision]
    if len(mine) - len(old) >= wanted_replicas(record):
        return ""
    for replica in old:
        room = room.give_back(replica.spec)
    return room.lack(record.spec.compute)


def failure_of(record: ApiRecord, replicas: Iterable[Replica], preparation: Preparation) -> Failure | None:
    """Return why the newest revision can't become ready, or None. `replicas` are those of that revision."""
    if preparation.failure:
        return preparation.failure
    failed = [process for replica in replicas for process in replica.status.processes if _failed(process)]
    for process in failed:
        if process.failure:
            return process.failure
    for process in failed:
        if process.death:
            return Failure(process.death.message)
    if record.failure:
        return Failure(record.failure.message, record.failure.traceback)
    return None


def _code(record: ApiRecord, updated: Counts, requested: int, failure: Failure | None) -> ApiStatus:
    if updated.ready >= requested:
        return ApiStatus.LIVE
    if updated.killed_oom and not updated.failed and not updated.killed:
        return ApiStatus.OOM
    if failure or updated.failed or updated.killed:
        return ApiStatus.ERROR
    if updated.stalled:
        return ApiStatus.STALLED
    # What has never served must show that it can, also where no replica is needed afterwards.
    fewest = max(record.spec.autoscaling.min_replicas, int(not is_proven(record)))
    if updated.ready >= fewest:
        return ApiStatus.LIVE
    return ApiStatus.UPDATING


def _is_stalled(record: ApiRecord, new: Sequence[Replica], preparation: Preparation, now: datetime) -> bool:
    starting = any(not replica.is_ready for replica in new)
    waiting = preparation.stage is not Stage.RUNNING and preparation.failure is None
    return waiting and not starting and now - record.updated_at > STALLED_AFTER


def _count(replicas: Iterable[Replica], terminating: int) -> Counts:
    counts = Counts(terminating=terminating)
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
    return process.failed_starts > 0 or process.state is ProcessState.BACKING_OFF


def _with(counts: Counts, **changes: int) -> Counts:
    return Counts(**{**asdict(counts), **changes})
