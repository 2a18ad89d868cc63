"""Decides what to start, replace and stop: desired APIs and what runs in, actions out. Pure; does nothing itself.

The rules, in the order in which they bind:
1. A change never leaves fewer ready replicas than before, unless `max_surge: 0` asks for replacing in place.
2. While the newest revision can't start, the one that served before it keeps its full number of replicas.
3. At most one replica that fails to start is kept at a time; its supervisor retries it.
4. No replica is started without free devices for it. If the old replicas of its API hold them, just as many of these go
   first as it takes, in spite of rule 1: nothing else would ever let an update begin. If the new revision then fails,
   it makes room again for the one that served, and is not tried anew before the next deploy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cortex.lifecycle import ApiKind, ProcessState
from cortex.operator.replicas.capacity import Room, wants_devices
from cortex.replica.spec import Failure, Limits, ProcessStatus, ReplicaSpec, ReplicaStatus
from cortex.state.apis import ApiRecord, Target


@dataclass(frozen=True)
class Replica:
    """A replica that runs and is not being stopped."""

    spec: ReplicaSpec
    status: ReplicaStatus

    @property
    def is_ready(self) -> bool:
        """Tell whether every process answers."""
        return self.status.is_ready

    @property
    def is_leaving(self) -> bool:
        """Tell whether it is to be replaced wherever another one finds a place."""
        return self.status.is_leaving

    @property
    def has_failed(self) -> bool:
        """Tell whether a process could not become ready at its last start."""
        return any(process.failed_starts > 0 for process in self.status.processes)

    @property
    def is_stuck(self) -> bool:
        """Tell whether it failed and nothing of it answers."""
        return self.has_failed and not any(p.state is ProcessState.READY for p in self.status.processes)

    @property
    def has_served(self) -> bool:
        """Tell whether every process answers or is being started again after it did."""
        return all(p.state is ProcessState.READY or is_restarting(p) for p in self.status.processes)


def is_restarting(process: ProcessStatus) -> bool:
    """Tell whether a process that answered before is being started again for the first time."""
    return process.state is ProcessState.STARTING and process.restarts > 0 and process.failed_starts == 0


class Stage(StrEnum):
    """How far the preparation of a revision (its project's environment, its model) is."""

    NEEDED = "needed"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True)
class Preparation:
    """What must be there before a revision's replicas can be started."""

    stage: Stage = Stage.NEEDED
    failure: Failure | None = None  #: of the last attempt, kept while the next one runs
    hold_until: float = 0.0  #: UNIX time before which nothing is prepared or started
    failures: int = 0  #: in a row
    lack: str = ""  #: what of the machine's devices the next replica is short of


@dataclass(frozen=True)
class Prepare:
    """Build the environment of a revision and fetch its model."""

    target: Target


@dataclass(frozen=True)
class Start:
    """Start one replica."""

    target: Target


@dataclass(frozen=True)
class Retire:
    """Take a replica out of the routes, let it finish, stop it."""

    replica_id: str


@dataclass(frozen=True)
class Promote:
    """Remember that a revision became ready."""

    target: Target


@dataclass(frozen=True)
class Configure:
    """Tell a replica the limits that its API has now."""

    replica_id: str
    limits: Limits


Action = Prepare | Start | Retire | Promote | Configure

#: Preparations by API and revision.
Preparations = Mapping[tuple[str, str], Preparation]


def wanted_replicas(record: ApiRecord, target: Target | None = None) -> int:
    """Return how many replicas an API is to have, of `target` where its newest revision can't take over.

    A revision that never served, or fails, has at least one, which shows when it can. One that runs jobs has none.
    """
    spec = (target or record.target).spec
    if not spec.kind.has_replicas:
        return 0
    scaling = spec.autoscaling
    wanted = scaling.init_replicas if record.replicas is None else record.replicas
    wanted = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
    return max(wanted, 1) if target is None and not is_proven(record) else wanted


def is_proven(record: ApiRecord) -> bool:
    """Tell whether the newest revision served, and nothing is known to be wrong with it."""
    return record.serving == record.target and record.failure is None


def plan(
    records: Iterable[ApiRecord],
    replicas: Iterable[Replica],
    preparations: Preparations,
    now: float,
    room: Room = Room(),  # noqa: B008 - it is frozen
) -> list[Action]:
    """Return the next actions, in the order in which to apply them; none once what runs is what is wanted.

    `room` is what `replicas` leave free of the machine's devices.
    """
    by_api: dict[str, list[Replica]] = {}
    for replica in replicas:
        by_api.setdefault(replica.spec.api, []).append(replica)
    actions: list[Action] = []
    for record in sorted(records, key=lambda record: _turn(record, by_api)):
        one = _ApiPlan.of(record, by_api.pop(record.name, []), preparations, now, room)
        actions += one.decide()
        room = one.room
    for orphans in by_api.values():
        actions += [Retire(replica.spec.id) for replica in orphans]
    return actions


def _turn(record: ApiRecord, by_api: Mapping[str, Sequence[Replica]]) -> tuple[bool, int]:
    """Return a key that sorts first who gets devices first: an API that served before one that waits for its turn.

    Otherwise another would take what an update has just set free.
    """
    return record.serving is None, len(by_api.get(record.name, ()))


@dataclass
class _ApiPlan:
    """The plan of one API while it is being made; `new` and `old` shrink as replicas are retired."""

    record: ApiRecord
    new: list[Replica]
    old: list[Replica]
    preparations: Preparations
    now: float
    wanted: int
    room: Room
    actions: list[Action] = field(default_factory=list)

    @classmethod
    def of(
        cls, record: ApiRecord, replicas: Sequence[Replica], preparations: Preparations, now: float, room: Room
    ) -> _ApiPlan:
        new: list[Replica] = []
        old: list[Replica] = []
        for replica in replicas:
            stays = replica.spec.revision == record.revision and not replica.is_leaving
            (new if stays else old).append(replica)
        return cls(record, new, old, preparations, now, wanted_replicas(record), room)

    def decide(self) -> list[Action]:
        if not self.record.spec.kind.has_replicas:
            return self._get_ready_for_jobs()
        self._promote()
        self._configure()
        self._retire_stuck()
        self._retire_surplus()
        self._retire_old()
        self._start_new()
        self._replace_lost_old()
        return self.actions

    def _get_ready_for_jobs(self) -> list[Action]:
        """Prepare an API whose code runs only in the workers of jobs."""
        target, preparation = self.record.target, self._preparation(self.record.target)
        if self.record.spec.kind is ApiKind.SPLITTER:  # which has no code
            preparation = Preparation(Stage.DONE)
        if preparation.stage is Stage.NEEDED and self.now >= preparation.hold_until:
            self.actions.append(Prepare(target))
        elif preparation.stage is Stage.DONE and not is_proven(self.record):
            self.actions.append(Promote(target))
        self.actions += [Retire(replica.spec.id) for replica in self.new + self.old]
        return self.actions

    def _promote(self) -> None:
        if self._new_ready() >= self.wanted and not is_proven(self.record):
            self.actions.append(Promote(self.record.target))

    def _configure(self) -> None:
        networking = self.record.spec.networking
        limits = Limits(networking.timeout_s, networking.max_body_size)
        self.actions += [Configure(r.spec.id, limits) for r in self.new + self.old if r.spec.limits != limits]

    def _retire_stuck(self) -> None:
        stuck = sorted((replica for replica in self.new if replica.is_stuck), key=_age)
        for replica in stuck if self._is_in_the_way() else stuck[1:]:
            self._retire(replica, self.new)

    def _retire_surplus(self) -> None:
        # Ready ones first, then the oldest: what callers are served by stays.
        ranked = sorted(self.new, key=lambda replica: (not replica.is_ready, replica.is_stuck, *_age(replica)))
        for replica in ranked[self.wanted :]:
            self._retire(replica, self.new)

    def _retire_old(self) -> None:
        served = self.record.serving.revision if self.record.serving else None
        for replica in list(self.old):
            if replica.spec.revision != served and not replica.has_served:
                self._retire(replica, self.old)  # a start that was overtaken by a newer deploy
        keep = max(0, self._floor() - self._new_ready())
        ranked = sorted(
            self.old, key=lambda replica: (not replica.is_ready, replica.spec.revision != served, *_age(replica))
        )
        keep = min(keep, len(ranked) - self._leaving_for_room(ranked))
        for replica in ranked[keep:]:
            self._retire(replica, self.old)

    def _start_new(self) -> None:
        missing = self.wanted - len(self.new)
        if missing <= 0 or any(replica.has_failed for replica in self.new) or self._yields():
            return
        if self.old and self._preparation(self.record.target).stage is Stage.DONE:
            missing = min(missing, self.wanted + self._surge() - len(self.new) - len(self.old))
        self._start(self.record.target, missing)

    def _replace_lost_old(self) -> None:
        """Keep the revision that served at its number while the newest one can't take over."""
        serving = self.record.serving
        if serving is None or serving.revision == self.record.revision:
            return
        if any(replica.has_failed for replica in self.old):
            return
        wanted = self._floor()
        if not self._new_fails():
            wanted = min(wanted, wanted_replicas(self.record, serving))
        proven = sum(replica.has_served for replica in self.new)
        self._start(serving, wanted - proven - len(self.old))

    def _start(self, target: Target, count: int) -> None:
        preparation = self._preparation(target)
        if count <= 0 or self.now < preparation.hold_until:
            return
        if preparation.stage is Stage.NEEDED:
            self.actions.append(Prepare(target))
        while count and preparation.stage is Stage.DONE and self.room.fits(target.spec.compute):
            self.room = self.room.take(target.spec.compute)
            self.actions.append(Start(target))
            count -= 1

    def _retire(self, replica: Replica, group: list[Replica]) -> None:
        group.remove(replica)
        self.room = self.room.give_back(replica.spec)
        self.actions.append(Retire(replica.spec.id))

    def _leaving_for_room(self, ranked: Sequence[Replica]) -> int:
        """Count the old replicas, from the end of `ranked`, without which the next new one finds room.

        None if it finds room anyway, if it can't start for another reason, or if not even all of them hold enough.
        """
        preparation, compute, room = self._preparation(self.record.target), self.record.spec.compute, self.room
        is_next = len(self.new) < self.wanted and all(replica.is_ready for replica in self.new)
        can_start = preparation.stage is Stage.DONE and self.now >= preparation.hold_until
        if not is_next or not can_start or self.record.failure or self._new_fails():
            return 0
        for count, replica in enumerate(reversed(ranked)):
            if room.fits(compute):
                return count
            room = room.give_back(replica.spec)
        return len(ranked) if room.fits(compute) else 0

    def _is_in_the_way(self) -> bool:
        """Tell whether the newest revision, which failed, holds devices that the one that served lacks."""
        serving = self._overtaken()
        if serving is None or not self._lost_old() or self.room.fits(serving.spec.compute):
            return False
        return wants_devices(self.record.spec.compute)

    def _yields(self) -> bool:
        """Tell whether the newest revision, which failed, would take devices that the one that served lacks."""
        serving, room = self._overtaken(), self.room
        if serving is None or not wants_devices(self.record.spec.compute):
            return False
        for _ in range(self._lost_old()):
            room = room.take(serving.spec.compute)
        return not room.fits(self.record.spec.compute)

    def _overtaken(self) -> Target | None:
        """Return what served before, if the newest revision failed to take over."""
        serving = self.record.serving
        is_other = serving is not None and serving.revision != self.record.revision
        return serving if is_other and self.record.failure is not None else None

    def _lost_old(self) -> int:
        """Count the replicas that the revision which served is short of."""
        return max(0, self._floor() - sum(replica.has_served for replica in self.new) - len(self.old))

    def _new_ready(self) -> int:
        return sum(replica.is_ready for replica in self.new)

    def _new_fails(self) -> bool:
        failed = self._preparation(self.record.target).failure is not None
        return failed or any(replica.has_failed for replica in self.new)

    def _preparation(self, target: Target) -> Preparation:
        return self.preparations.get((self.record.name, target.revision), Preparation())

    def _surge(self) -> int:
        """Return how many replicas more than wanted an update may have."""
        surge = _share(self.record.spec.update_strategy.max_surge, self.wanted, math.ceil)
        return surge if self._is_in_place() else max(1, surge)

    def _floor(self) -> int:
        """Return how many ready replicas an update keeps."""
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


def _age(replica: Replica) -> tuple[float, str]:
    return replica.status.started_at, replica.spec.id
