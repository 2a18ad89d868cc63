"""Makes what runs become what is wanted: load, plan (pure), apply, again after each change.

Knows engine, gateway and store by their protocols; what to do is decided in `plan.py`, `routing.py`, `status.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from cortex.engine.base import Engine
from cortex.engine.environment import Prepared
from cortex.engine.logs import prune as prune_logs
from cortex.errors import ComputeUnavailableError, DatabaseUnavailableError, EngineError, GatewayError
from cortex.gateway.routes import ApiKey, RoutingTable
from cortex.home import Home
from cortex.lifecycle import ApiKind, ApiStatus, ProcessState
from cortex.operator.deploy.projects import ProjectFolders
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.jobs.async_apis import AsyncApis
from cortex.operator.replicas.capacity import Room
from cortex.operator.replicas.plan import (
    Action,
    Configure,
    Preparation,
    Prepare,
    Promote,
    Replica,
    Retire,
    Start,
    is_proven,
    plan,
)
from cortex.operator.replicas.preparations import Key, Preparations
from cortex.operator.replicas.publisher import Gateway, RoutePublisher
from cortex.operator.replicas.replica_specs import replica_spec
from cortex.operator.replicas.routing import routes_of, server_name
from cortex.operator.replicas.status import ApiState, failure_of, lack_of, seen_through_gateway, status_of
from cortex.replica.spec import ReplicaSpec, ReplicaStatus
from cortex.state.apis import ApiRecord, ApiStore, StoredFailure, Target
from cortex.telemetry import Logger

#: Back-offs end unannounced, so a pass is made at least this often.
TICK_S = 1.0
_DRAIN_POLL_S = 0.05
#: How long a gateway that can't be reached may delay the stop of a replica.
_ROUTES_TIMEOUT_S = 15.0
_LEAVING = (ProcessState.STOPPING, ProcessState.STOPPED)


class Reconciler:
    """The control loop. `wake` after each change of what is wanted; the engine wakes it after its own."""

    def __init__(
        self,
        home: Home,
        store: ApiStore,
        engine: Engine,
        gateway: Gateway,
        prepare: Callable[[Target], Awaitable[Prepared]],
        logger: Logger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home = home
        self._store = store
        self._engine = engine
        self._gateway = gateway
        self._logger = logger
        self._clock = clock
        self._projects = ProjectFolders(home)
        self.preparations = Preparations(prepare, self.wake, clock, logger)
        self.targets_of_jobs: Callable[[], Iterable[Target]] = tuple  #: what must be kept beside that of the APIs
        self.gateway_secret = ""  #: what the gateway shows to replicas that it reaches over TCP
        self.is_blameless: Callable[[str], bool] = lambda name: False  #: whether a replica ended with its node
        self.gateways: Callable[[], int] = lambda: 1  #: how many serve the routes
        self.keys: Callable[[], Iterable[ApiKey]] = tuple  #: of callers
        self.async_apis: AsyncApis | None = None  #: whom replicas of AsyncAPIs work for
        self.publisher = RoutePublisher(gateway, self._tell_changed, logger)
        self._awake = asyncio.Event()
        self._changed = asyncio.Event()
        self._retiring: dict[str, asyncio.Task[None] | None] = {}
        self._known: dict[str, Replica] = {}
        self._used_projects: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._error_log = LoopErrorLog(logger, "reconciling failed")

    def wake(self) -> None:
        """Have a pass made soon."""
        self._awake.set()

    async def run(self) -> None:
        """Make passes until cancelled."""
        publishing = asyncio.create_task(self.publisher.run(), name="publish routes")
        try:
            while True:
                await self._one_pass()
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._awake.wait()
                except TimeoutError:
                    pass
        finally:
            publishing.cancel()
            for task in [*self._retiring.values(), *self._background]:
                if task:
                    task.cancel()
            await self.preparations.shutdown()

    def state(self, record: ApiRecord) -> ApiState:
        """Return how an API is now, its routes included."""
        return seen_through_gateway(self.own_state(record), self.publisher.is_late, self.publisher.failure)

    def own_state(self, record: ApiRecord) -> ApiState:
        """Return how an API is now, whatever the gateway does."""
        mine = [replica for replica in self._replicas() if replica.spec.api == record.name]
        active = [replica for replica in mine if self._is_active(replica)]
        leaving = [replica for replica in mine if not self._is_active(replica)]
        preparation = self._states([record]).get((record.name, record.revision), Preparation())
        return status_of(record, active, leaving, preparation, datetime.fromtimestamp(self._clock(), UTC))

    def is_updating(self, record: ApiRecord) -> bool:
        """Tell whether its newest revision is on the way; one that served and is merely started again is not."""
        return not is_proven(record) and self.own_state(record).status is ApiStatus.UPDATING

    def statuses(self, name: str) -> list[ReplicaStatus]:
        """Return how the replicas of an API are that are not being stopped."""
        return [replica.status for replica in self._active() if replica.spec.api == name]

    def routes(self) -> RoutingTable:
        """Return the routes to what runs now."""
        records = self._store.records()
        jobs_socket = str(self._home.jobs_socket)
        table = routes_of(records, self._active(), self._states(records), jobs_socket, self.keys(), self.gateways())
        return replace(table, gateway_secret=self.gateway_secret)

    async def publish_now(self) -> None:
        """Bring the gateway to the present routes; returns once they are in force."""
        self.publisher.publish(self.routes())
        await self.publisher.applied()

    async def settled(self, name: str, timeout_s: float) -> None:
        """Wait until an API is gone or not `updating` any more, and the routes that follow are in force."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_settled(self._store.get(name)):
                    await self._changed.wait()
        except TimeoutError:
            pass

    async def stop_all(self, timeout_s: float) -> None:
        """Stop every replica; returns once they are gone or `timeout_s` has passed. `run` must have ended."""
        deadline = time.monotonic() + timeout_s
        for spec, _ in self._engine.replicas().values():
            await self._engine.stop(spec.id, min(spec.timeout_s, timeout_s))
        while self._engine.replicas() and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)

    def _is_settled(self, record: ApiRecord | None) -> bool:
        # A pass that is due may publish other routes.
        is_last = not self._awake.is_set()
        if record is None:
            return is_last and self.publisher.is_settled
        routes_are_known = self.publisher.is_settled or bool(self.publisher.failure)
        return is_last and routes_are_known and self.state(record).status is not ApiStatus.UPDATING

    def _replicas(self) -> list[Replica]:
        """Return the replicas that serve APIs: workers of jobs are their supervisor's."""
        running = self._engine.replicas().values()
        return [Replica(spec, status) for spec, status in running if not spec.is_job_worker]

    def _is_active(self, replica: Replica) -> bool:
        is_leaving = any(process.state in _LEAVING for process in replica.status.processes)
        return replica.spec.id not in self._retiring and not is_leaving

    def _active(self) -> list[Replica]:
        return [replica for replica in self._replicas() if self._is_active(replica)]

    def _room(self) -> Room:
        return Room.of(self._engine.devices(), [replica.spec for replica in self._active()])

    def _states(self, records: Sequence[ApiRecord]) -> dict[Key, Preparation]:
        """Return how far each revision is, and what the newest of `records` lack."""
        states, active, room = self.preparations.states(), self._active(), self._room()
        for record in records:
            key = (record.name, record.revision)
            if key in states:
                states[key] = replace(states[key], lack=lack_of(record, active, room))
        return states

    async def _one_pass(self) -> None:
        self._awake.clear()
        try:
            await self._reconcile()
        except Exception as error:  # one bad pass must not end the control loop
            self._error_log.failed(error)
        self._tell_changed()

    def _tell_changed(self) -> None:
        """Let those who wait for a status look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _reconcile(self) -> None:
        records = self._store.records()
        self._note_losses()
        for replica in self._active():
            if replica.is_ready:
                self.preparations.became_ready(_key(replica))
        actions = plan(records, self._active(), self.preparations.states(), self._clock(), self._room())
        for action in actions:
            await self._apply(action)
        records = self._store.records()
        self._record_failures(records)
        self._known = {replica.spec.id: replica for replica in self._active()}
        self.publisher.publish(self.routes())
        self._retire()
        self._forget_unused(records)

    async def _apply(self, action: Action) -> None:
        match action:
            case Prepare(target):
                self.preparations.begin(target)
            case Start(target):
                await self._start(target)
            case Retire(replica_id):
                self._retiring[replica_id] = None  # out of the routes first; `_retire` does the rest
            case Configure(replica_id, limits):
                await self._engine.configure(replica_id, limits)
            case Promote(target):
                if self._stored(partial(self._store.mark_serving, target.spec.name, target)):
                    self._logger.info("revision is live", api=target.spec.name, revision=target.revision[:8])

    async def _start(self, target: Target) -> None:
        prepared = self.preparations.prepared(target)
        if prepared is None:
            return
        spec = replica_spec(self._home, target, prepared)
        start = self.async_apis.start if self.async_apis and spec.kind == ApiKind.ASYNC else self._engine.start
        try:
            await start(spec)
            self._logger.info("replica started", api=spec.api, replica=spec.id)
            self._in_background(self._prune_logs(), "prune logs")
        except ComputeUnavailableError:
            pass  # a replica that is being stopped still holds what it needs; its end wakes us
        except EngineError as error:
            self.preparations.start_failed(target, error)
            self._logger.error("replica could not be started", api=spec.api, error=error)

    def _retire(self) -> None:
        """Begin to drain the replicas that the newest published routes don't name any more."""
        running = self._engine.replicas()
        for replica_id in [name for name, task in self._retiring.items() if task is None and name in running]:
            spec, _ = running[replica_id]
            self._logger.info("replica is being retired", api=spec.api, replica=replica_id)
            drain = asyncio.create_task(self._drain_and_stop(spec), name=f"retire {replica_id}")
            self._retiring[replica_id] = drain

    async def _drain_and_stop(self, spec: ReplicaSpec) -> None:
        if spec.kind == ApiKind.ASYNC and self.async_apis is not None:
            await self.async_apis.retire(spec)
            return
        deadline = time.monotonic() + spec.timeout_s
        servers = {server_name(spec.id, index) for index in range(len(spec.sockets))}
        try:
            async with asyncio.timeout(_ROUTES_TIMEOUT_S):
                await self.publisher.applied()
            while time.monotonic() < deadline:
                if await self._gateway.drained(servers) >= servers:
                    break
                await asyncio.sleep(_DRAIN_POLL_S)
        except (TimeoutError, GatewayError) as error:
            self._logger.warning("replica stopped without the gateway's word", replica=spec.id, error=error)
        await self._engine.stop(spec.id, spec.timeout_s)

    def _note_losses(self) -> None:
        running = self._engine.replicas()
        for replica_id in [name for name in self._retiring if name not in running]:
            del self._retiring[replica_id]
        for replica_id, replica in self._known.items():
            if replica_id not in running:
                self.preparations.lost(_key(replica), replica.is_ready or self.is_blameless(replica_id))

    def _record_failures(self, records: Sequence[ApiRecord]) -> None:
        """Keep why a revision fails, so that it is still known while the next attempt runs."""
        states = self.preparations.states()
        for record in records:
            newest = [r for r in self._active() if _key(r) == (record.name, record.revision)]
            preparation = states.get((record.name, record.revision), Preparation())
            failure = failure_of(replace(record, failure=None), newest, preparation)
            if failure is None:
                continue
            stored = StoredFailure(failure.message, failure.traceback)
            mark = partial(self._store.mark_failed, record.name, record.revision, stored)
            if stored != record.failure and self._stored(mark):
                self._logger.warning("revision fails", api=record.name, error=failure.message)

    def _stored(self, write: Callable[[], None]) -> bool:
        """Write what was seen; while the database is away the next pass sees it again, and the rest of this goes on."""
        try:
            write()
        except DatabaseUnavailableError as error:
            self._error_log.failed(error)
            return False
        self._error_log.succeeded()
        return True

    def _forget_unused(self, records: Sequence[ApiRecord]) -> None:
        targets = [target for record in records for target in (record.target, record.serving) if target]
        targets += self.targets_of_jobs()
        self.preparations.keep_only({(target.spec.name, target.revision) for target in targets})
        used = {target.project_hash for target in targets}
        used |= {Path(spec.project_dir).name for spec, _ in self._engine.replicas().values()}
        if used != self._used_projects:
            self._used_projects = used
            # Set aside in the same step in which the records were read: no deploy can come between.
            unused = self._projects.set_aside_unused(used)
            self._in_background(self._projects.delete(unused), "delete projects")

    async def _prune_logs(self) -> None:
        try:
            await asyncio.to_thread(prune_logs, self._home.logs_dir, set(self._engine.replicas()))
        except OSError as error:
            self._logger.warning("old logs can't be deleted", error=error)

    def _in_background(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _key(replica: Replica) -> Key:
    return replica.spec.api, replica.spec.revision
