"""Decide which replicas to start, replace and stop. Pure: desired APIs and running replicas in, actions out.

The rules, in the order of precedence:

1. A change never leaves fewer ready replicas than before, unless `max_surge: 0` requests an in-place update.
2. While the newest revision can't start, the revision that served before keeps its full number of replicas.
3. At most one replica that fails to start is kept at a time; its supervisor retries it.
4. A replica starts only if enough devices are free. If the old replicas of its API hold them, as many of these as
   necessary are retired first, in spite of rule 1: otherwise no update could ever begin. If the new revision then
   fails, its replicas release the devices to the revision that served, and it is not retried before the next deploy.
5. While the newest revision is a canary, it has as many replicas as its share of the requests needs, in addition to
   those of the revision that serves. It is not promoted before its trial ends (`operator/canary`).

A revision on its way to traffic:

              Prepare                  done             Start             all processes ready
    NEEDED -------------> RUNNING ------------> DONE ------------> replica ------------------> Promote
       ^                     |                                        |
       +---- failed: retry --+                                        | newer revision, lower count, or deleted
             after backoff                                            v
                                                                   Retire: removed from the routes, drained, stopped
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from cortex.lifecycle import ApiKind, ProcessState
from cortex.operator.revisions.capacity import DeviceCapacity, needs_devices
from cortex.operator.revisions.preparation_states import Preparation, PreparationStates, Stage
from cortex.operator.revisions.replica_specs import limits_of
from cortex.state.queries.apis import ApiRecord
from cortex.state.revision import Revision
from cortex.worker.spec import ProcessStatus, ReplicaSpec, ReplicaStatus, RequestLimits


@dataclass(frozen=True)
class Replica:
    """A running replica: its spec and its newest status."""

    spec: ReplicaSpec
    status: ReplicaStatus

    @property
    def is_ready(self) -> bool:
        """Return whether every process is ready."""
        return self.status.is_ready

    @property
    def is_leaving(self) -> bool:
        """Return whether the replica should be replaced as soon as another one can be placed."""
        return self.status.is_leaving

    @property
    def has_failed(self) -> bool:
        """Return whether the last start of any process failed."""
        return any(process.failed_starts > 0 for process in self.status.processes)

    @property
    def is_stuck(self) -> bool:
        """Return whether the replica has failed and no process is ready."""
        return self.has_failed and not any(p.state is ProcessState.READY for p in self.status.processes)

    @property
    def has_served(self) -> bool:
        """Return whether every process is ready or is restarting after it was."""
        return all(p.state is ProcessState.READY or is_restarting(p) for p in self.status.processes)


def is_restarting(process: ProcessStatus) -> bool:
    """Return whether a process that was ready before is in its first restart attempt.

    A process with a failure runs, and is not ready any more.
    """
    is_first = process.restarts > 0 and process.failed_starts == 0 and process.failure is None
    return process.state is ProcessState.STARTING and is_first


@dataclass(frozen=True)
class Prepare:
    """Build the environment of a revision and fetch its model."""

    revision: Revision


@dataclass(frozen=True)
class Start:
    """Start one replica."""

    revision: Revision


@dataclass(frozen=True)
class Retire:
    """Remove a replica from the routes, drain it, and stop it."""

    replica_id: str


@dataclass(frozen=True)
class Promote:
    """Record that a revision became ready."""

    revision: Revision


@dataclass(frozen=True)
class Configure:
    """Send a replica the current limits of its API."""

    replica_id: str
    limits: RequestLimits


ReplicaAction = Prepare | Start | Retire | Promote | Configure


def wanted_replicas(record: ApiRecord, revision: Revision | None = None) -> int:
    """Return the desired number of replicas of an API, or of `revision` while the newest one can't take over.

    A revision that never served, or that fails, gets at least one replica, to detect when it becomes ready. An API that
    runs jobs has none.
    """
    spec = (revision or record.target).spec
    if not spec.kind.has_replicas:
        return 0
    scaling = spec.autoscaling
    wanted = scaling.init_replicas if record.replicas is None else record.replicas
    wanted = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
    return max(wanted, 1) if revision is None and not is_proven(record) else wanted


def canary_replicas(wanted: int, percent: int) -> int:
    """Return the replicas that a canary needs for its share of the requests that `wanted` replicas serve."""
    return max(1, math.ceil(wanted * percent / 100))


def is_proven(record: ApiRecord) -> bool:
    """Return whether the newest revision has served and has no recorded failure."""
    return record.serving == record.target and record.failure is None


def plan(
    records: Iterable[ApiRecord],
    replicas: Iterable[Replica],
    preparations: PreparationStates,
    now: float,
    capacity: DeviceCapacity = DeviceCapacity(),  # noqa: B008 - it is frozen
    canaries: Mapping[str, int] = MappingProxyType({}),
) -> list[ReplicaAction]:
    """Return the next actions, in the order in which to apply them; none if the desired state is reached.

    `capacity` is what `replicas` leave free of the devices. `canaries` has the share of the newest revision, in
    percent, of each API whose newest revision is tried.
    """
    by_api: dict[str, list[Replica]] = {}
    for replica in replicas:
        by_api.setdefault(replica.spec.api, []).append(replica)
    actions: list[ReplicaAction] = []
    for record in sorted(records, key=lambda record: _device_priority(record, by_api)):
        percent = canaries.get(record.name)
        one = _ApiPlan.of(record, by_api.pop(record.name, []), preparations, now, capacity, percent)
        actions += one.decide()
        capacity = one.capacity
    for orphans in by_api.values():
        actions += [Retire(replica.spec.id) for replica in orphans]
    return actions


def _device_priority(record: ApiRecord, by_api: Mapping[str, Sequence[Replica]]) -> tuple[bool, int]:
    """Return a sort key for the allocation of devices: APIs that have served come first.

    Otherwise another API could claim the devices that an update has just released.
    """
    return record.serving is None, len(by_api.get(record.name, ()))


@dataclass
class _ApiPlan:
    """Plan for one API under construction; `new` and `old` shrink as replicas are retired."""

    record: ApiRecord
    new: list[Replica]
    old: list[Replica]
    preparations: PreparationStates
    now: float
    wanted: int  #: replicas of the newest revision
    capacity: DeviceCapacity
    canary_percent: int | None = None  #: share of the requests while the newest revision is tried
    actions: list[ReplicaAction] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        record: ApiRecord,
        replicas: Sequence[Replica],
        preparations: PreparationStates,
        now: float,
        capacity: DeviceCapacity,
        canary_percent: int | None,
    ) -> _ApiPlan:
        new: list[Replica] = []
        old: list[Replica] = []
        for replica in replicas:
            stays = replica.spec.revision == record.revision and not replica.is_leaving
            (new if stays else old).append(replica)
        wanted = wanted_replicas(record)
        if canary_percent is not None:
            wanted = canary_replicas(wanted, canary_percent)
        return cls(record, new, old, preparations, now, wanted, capacity, canary_percent)

    def decide(self) -> list[ReplicaAction]:
        if not self.record.spec.kind.has_replicas:
            return self._prepare_for_jobs()
        self._promote()
        self._configure()
        self._retire_stuck()
        self._retire_surplus()
        self._retire_old()
        self._start_new()
        self._replace_lost_old()
        return self.actions

    def _prepare_for_jobs(self) -> list[ReplicaAction]:
        """Prepare an API whose code runs only in job workers."""
        revision, preparation = self.record.target, self._preparation(self.record.target)
        if self.record.spec.kind is ApiKind.SPLITTER:  # has no code
            preparation = Preparation(Stage.DONE)
        if preparation.stage is Stage.NEEDED and self.now >= preparation.hold_until:
            self.actions.append(Prepare(revision))
        elif preparation.stage is Stage.DONE and not is_proven(self.record):
            self.actions.append(Promote(revision))
        self.actions += [Retire(replica.spec.id) for replica in self.new + self.old]
        return self.actions

    def _promote(self) -> None:
        if self.canary_percent is None and self._new_ready() >= self.wanted and not is_proven(self.record):
            self.actions.append(Promote(self.record.target))

    def _configure(self) -> None:
        limits = limits_of(self.record.spec)
        self.actions += [Configure(r.spec.id, limits) for r in self.new + self.old if r.spec.limits != limits]

    def _retire_stuck(self) -> None:
        stuck = sorted((replica for replica in self.new if replica.is_stuck), key=_age)
        for replica in stuck if self._blocks_serving_revision() else stuck[1:]:
            self._retire(replica, self.new)

    def _retire_surplus(self) -> None:
        # Replicas with a reservation stay, but not at the cost of ready ones; then those that serve callers.
        ranked = _spread(self.new, lambda r: (r.is_stuck, r.status.is_unreserved, not r.is_ready))
        ready = sum(replica.is_ready for replica in ranked[: self.wanted])
        for replica in ranked[self.wanted :]:
            if replica.is_ready and ready < self.wanted:
                ready += 1
            else:
                self._retire(replica, self.new)

    def _retire_old(self) -> None:
        served = self.record.serving.hash if self.record.serving else None
        for replica in list(self.old):
            if replica.spec.revision != served and not replica.has_served:
                self._retire(replica, self.old)  # superseded by a newer deploy before it served
        keep = max(0, self._floor() - self._counted(self._new_ready()))
        ranked = _spread(self.old, lambda r: (not r.is_ready, r.spec.revision != served))
        if self.canary_percent is None:
            keep = min(keep, len(ranked) - self._retired_for_devices(ranked))
        for replica in ranked[keep:]:
            self._retire(replica, self.old)

    def _start_new(self) -> None:
        missing = self.wanted - len(self.new)
        if missing <= 0 or any(replica.has_failed for replica in self.new) or self._yields_devices():
            return
        is_update = self.old and self.canary_percent is None
        if is_update and self._preparation(self.record.target).stage is Stage.DONE:
            missing = min(missing, self.wanted + self._surge() - len(self.new) - len(self.old))
        self._start(self.record.target, missing)

    def _replace_lost_old(self) -> None:
        """Keep the previous revision at its full number while the newest one can't take over."""
        serving = self.record.serving
        if serving is None or serving.hash == self.record.revision:
            return
        if any(replica.has_failed for replica in self.old):
            return
        wanted = self._floor()
        if not self._new_fails() and self.canary_percent is None:
            wanted = min(wanted, wanted_replicas(self.record, serving))
        proven = sum(replica.has_served for replica in self.new)
        self._start(serving, wanted - self._counted(proven) - len(self.old))

    def _start(self, revision: Revision, count: int) -> None:
        preparation = self._preparation(revision)
        if count <= 0 or self.now < preparation.hold_until:
            return
        if preparation.stage is Stage.NEEDED:
            self.actions.append(Prepare(revision))
        while count and preparation.stage is Stage.DONE and self.capacity.fits(revision.spec.compute):
            self.capacity = self.capacity.reserve(revision.spec.compute)
            self.actions.append(Start(revision))
            count -= 1

    def _retire(self, replica: Replica, group: list[Replica]) -> None:
        group.remove(replica)
        self.capacity = self.capacity.release(replica.spec)
        self.actions.append(Retire(replica.spec.id))

    def _retired_for_devices(self, ranked: Sequence[Replica]) -> int:
        """Count the old replicas, from the end of `ranked`, to retire so that the next new replica fits.

        Return 0 if the replica fits without retiring any, can't start for another reason, or would not fit even without
        all of them.
        """
        preparation, compute = self._preparation(self.record.target), self.record.spec.compute
        capacity = self.capacity
        is_next = len(self.new) < self.wanted and all(replica.is_ready for replica in self.new)
        can_start = preparation.stage is Stage.DONE and self.now >= preparation.hold_until
        if not is_next or not can_start or self.record.failure or self._new_fails():
            return 0
        for count, replica in enumerate(reversed(ranked)):
            if capacity.fits(compute):
                return count
            capacity = capacity.release(replica.spec)
        return len(ranked) if capacity.fits(compute) else 0

    def _blocks_serving_revision(self) -> bool:
        """Return whether the failed newest revision holds devices that the previous one needs."""
        serving = self._previous()
        if serving is None or not self._lost_old() or self.capacity.fits(serving.spec.compute):
            return False
        return needs_devices(self.record.spec.compute)

    def _yields_devices(self) -> bool:
        """Return whether the failed newest revision would claim devices that the previous one needs."""
        serving, capacity = self._previous(), self.capacity
        if serving is None or not needs_devices(self.record.spec.compute):
            return False
        for _ in range(self._lost_old()):
            capacity = capacity.reserve(serving.spec.compute)
        return not capacity.fits(self.record.spec.compute)

    def _previous(self) -> Revision | None:
        """Return the revision that served before, if the newest one failed to take over."""
        serving = self.record.serving
        is_other = serving is not None and serving.hash != self.record.revision
        return serving if is_other and self.record.failure is not None else None

    def _lost_old(self) -> int:
        """Count the replicas that the previous revision is missing."""
        proven = sum(replica.has_served for replica in self.new)
        return max(0, self._floor() - self._counted(proven) - len(self.old))

    def _new_ready(self) -> int:
        return sum(replica.is_ready for replica in self.new)

    def _counted(self, new: int) -> int:
        """Return how many of the `new` replicas take the place of old ones; those of a canary do not."""
        return new if self.canary_percent is None else 0

    def _new_fails(self) -> bool:
        failed = self._preparation(self.record.target).failure is not None
        return failed or any(replica.has_failed for replica in self.new)

    def _preparation(self, revision: Revision) -> Preparation:
        return self.preparations.get((self.record.name, revision.hash), Preparation())

    def _surge(self) -> int:
        """Return how many extra replicas an update may run."""
        surge = _share(self.record.spec.update_strategy.max_surge, self.wanted, math.ceil)
        return surge if self._is_in_place() else max(1, surge)

    def _floor(self) -> int:
        """Return how many ready replicas an update must keep."""
        if self.canary_percent is not None:
            return wanted_replicas(self.record)
        if not self._is_in_place() or self._preparation(self.record.target).stage is not Stage.DONE:
            return self.wanted
        unavailable = _share(self.record.spec.update_strategy.max_unavailable, self.wanted, math.floor)
        return max(0, self.wanted - max(1, unavailable))

    def _is_in_place(self) -> bool:
        return self.record.spec.update_strategy.max_surge.rstrip("%") == "0"


def _share(value: str, of: int, rounded: Callable[[float], int]) -> int:
    if value.endswith("%"):
        return rounded(int(value[:-1]) * of / 100)
    return int(value)


def _spread(replicas: Sequence[Replica], rank: Callable[[Replica], tuple[bool, ...]]) -> list[Replica]:
    """Sort by rank. The first of equal rank, any number of them, are spread over the nodes; the oldest come first."""
    on_node: Counter[str] = Counter()
    place: dict[str, int] = {}
    for replica in sorted(replicas, key=lambda replica: (*rank(replica), *_age(replica))):
        place[replica.spec.id] = on_node[replica.status.node]
        on_node[replica.status.node] += 1
    return sorted(replicas, key=lambda replica: (*rank(replica), place[replica.spec.id], *_age(replica)))


def _age(replica: Replica) -> tuple[float, str]:
    return replica.status.started_at, replica.spec.id
