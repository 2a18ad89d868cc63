"""The replicas' control loop: load the desired state, plan (pure), apply, and repeat after each change.

The decisions are in `plan.py`, `routing.py` and `status.py`. One pass:

    records + engine.replicas()            desired APIs, running replicas
      -> losses and readiness              `preparations.py`: backoff
      -> plan() -> actions                 Prepare, Start, Retire, Configure, Promote
      -> routes() -> publisher             new routes come into force before any replica is drained
      -> drain and stop retired replicas   in the background
      -> forget unused revisions, projects
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from cortex.engine.logs import prune as prune_logs
from cortex.errors import ComputeUnavailableError, DatabaseUnavailableError, EngineError, GatewayError
from cortex.gateway.routes import ApiKey, RoutingTable
from cortex.lifecycle import ApiKind, ApiStatus, ProcessState
from cortex.operator.context import OperatorContext
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.infrastructure import Infrastructure
from cortex.operator.jobs.async_apis import AsyncApis
from cortex.operator.replicas.plan import (
    Configure,
    Prepare,
    Promote,
    Replica,
    ReplicaAction,
    Retire,
    Start,
    is_proven,
    plan,
)
from cortex.operator.replicas.routing import RoutePublisher, RouteSettings, routes_of, server_name
from cortex.operator.replicas.signatures import RoutedApis, Signatures
from cortex.operator.replicas.status import ApiState, failure_of, shortage_of, status_of, through_gateway
from cortex.operator.revisions.capacity import DeviceCapacity
from cortex.operator.revisions.preparation_states import Preparation, RevisionKey
from cortex.operator.revisions.replica_specs import replica_spec
from cortex.state.queries.apis import ApiRecord, StoredFailure
from cortex.state.revision import Revision
from cortex.worker.spec import ReplicaSpec, ReplicaStatus

#: Maximum time between two passes. Backoffs end without a notification.
TICK_S = 1.0
_DRAIN_POLL_S = 0.05
#: Maximum delay of a replica's stop by an unreachable gateway.
_ROUTES_TIMEOUT_S = 15.0
_LEAVING = (ProcessState.STOPPING, ProcessState.STOPPED)


class Reconciler:
    """Starts, replaces and stops replicas until they match the desired APIs.

    Args:
        job_revisions: Returns the revisions that jobs still need, besides those of the APIs.
        keys: Returns the API keys that the gateway accepts.
        signatures: Stores the signatures that replicas and job workers report.
        canary_percents: Returns the percentage for the newest revision of each API whose newest revision is tried.
    """

    def __init__(
        self,
        context: OperatorContext,
        infrastructure: Infrastructure,
        async_apis: AsyncApis,
        job_revisions: Callable[[], Iterable[Revision]],
        keys: Callable[[], Iterable[ApiKey]],
        signatures: Signatures,
        canary_percents: Callable[[Iterable[ApiRecord]], Mapping[str, int]],
    ) -> None:
        self._home = context.home
        self._store = context.apis
        self._logger = context.logger
        self._clock = context.clock
        self._awake = context.wakes.replicas
        self._infrastructure = infrastructure
        self._engine = infrastructure.engine
        self._preparations = infrastructure.preparations
        self._async_apis = async_apis
        self._job_revisions = job_revisions
        self._keys = keys
        self._signatures = signatures
        self._canary_percents = canary_percents
        self._projects = context.projects
        self._route_settings = RouteSettings(
            infrastructure.gateway_secret,
            context.installation.v2_at_root,
            context.installation.connections_per_address,
        )
        self._routed_apis = RoutedApis(signatures, self._projects)
        self._publisher = RoutePublisher(infrastructure.gateway, self._notify_changed, self._logger)
        self._changed = asyncio.Event()
        self._retiring: dict[str, asyncio.Task[None] | None] = {}  #: None: new routes must be published first
        self._known: dict[str, Replica] = {}  #: active replicas of the last pass
        self._used_projects: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._error_log = LoopErrorLog(self._logger, "reconciling failed")

    async def startup(self) -> None:
        """Start the gateway with routes to the replicas that run already. Raises: GatewayError."""
        await self._publisher.startup(self.routes())

    async def run(self) -> None:
        """Run passes until cancelled."""
        publishing = asyncio.create_task(self._publisher.run(), name="publish routes")
        try:
            while True:
                await self._run_pass()
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

    async def stop_all(self, timeout_s: float, exit_s: float) -> None:
        """Stop every replica, and wait until all have ended, up to `exit_s` longer than their requests may take.

        Call it only after `run` has ended.
        """
        deadline = time.monotonic() + timeout_s + exit_s
        for spec, _ in self._engine.replicas().values():
            await self._engine.stop(spec.id, min(spec.timeout_s, timeout_s))
        while self._engine.replicas() and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)

    # Queries.

    def state(self, record: ApiRecord) -> ApiState:
        """Return the current state of an API, including its routes."""
        own, publisher = self.own_state(record), self._publisher
        has_routes = not own.updated.ready or publisher.has_routes(record.name)
        return through_gateway(own, publisher.is_late or not has_routes, publisher.failure)

    def own_state(self, record: ApiRecord) -> ApiState:
        """Return the current state of an API, regardless of the gateway."""
        mine = [replica for replica in self._replicas() if replica.spec.api == record.name]
        active = [replica for replica in mine if self._is_active(replica)]
        leaving = [replica for replica in mine if not self._is_active(replica)]
        preparation = self._states([record]).get((record.name, record.revision), Preparation())
        percent = self._canary_percents([record]).get(record.name)
        return status_of(record, active, leaving, preparation, datetime.fromtimestamp(self._clock(), UTC), percent)

    def is_updating(self, record: ApiRecord) -> bool:
        """Return whether the newest revision is being rolled out; a restart of one that has served doesn't count."""
        return not is_proven(record) and self.own_state(record).status is ApiStatus.UPDATING

    def statuses(self, name: str) -> list[ReplicaStatus]:
        """Return the statuses of an API's active replicas."""
        return [replica.status for replica in self._active() if replica.spec.api == name]

    def routes(self) -> RoutingTable:
        """Return the routing table for the active replicas."""
        records = self._store.records()
        jobs_socket = str(self._home.jobs_socket)
        table = routes_of(
            records,
            self._active(),
            self._states(records),
            jobs_socket,
            self._keys(),
            self._infrastructure.gateway_count(),
            self._routed_apis.names(records),
            self._canary_percents(records),
        )
        return replace(table, **self._route_settings._asdict())

    async def publish_now(self) -> None:
        """Publish the current routes and wait until they are in force."""
        self._publisher.publish(self.routes())
        await self._publisher.applied()

    async def settled(self, name: str, timeout_s: float) -> None:
        """Wait until an API is deleted or no longer `updating`, and the resulting routes are in force."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_settled(self._store.get(name)):
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _is_settled(self, record: ApiRecord | None) -> bool:
        is_last = not self._awake.is_set()  # a pending pass may publish other routes
        if record is None:
            return is_last and self._publisher.is_settled
        routes_are_known = self._publisher.is_settled or bool(self._publisher.failure)
        return is_last and routes_are_known and self.state(record).status is not ApiStatus.UPDATING

    def _replicas(self) -> list[Replica]:
        """Return the running replicas of APIs; job workers belong to the job reconciler."""
        running = self._engine.replicas().values()
        return [Replica(spec, status) for spec, status in running if not spec.is_job_worker]

    def _is_active(self, replica: Replica) -> bool:
        is_leaving = any(process.state in _LEAVING for process in replica.status.processes)
        return replica.spec.id not in self._retiring and not is_leaving

    def _active(self) -> list[Replica]:
        return [replica for replica in self._replicas() if self._is_active(replica)]

    def _capacity(self) -> DeviceCapacity:
        return DeviceCapacity.of(self._engine.devices(), [replica.spec for replica in self._active()])

    def _states(self, records: Sequence[ApiRecord]) -> dict[RevisionKey, Preparation]:
        """Return the preparation of each revision, with the device shortages of the newest revisions of `records`."""
        states, active, capacity = self._preparations.states(), self._active(), self._capacity()
        for record in records:
            key = (record.name, record.revision)
            if key in states:
                states[key] = replace(states[key], shortage=shortage_of(record, active, capacity))
        return states

    # One pass.

    async def _run_pass(self) -> None:
        self._awake.clear()
        try:
            await self._reconcile()
        except Exception as error:  # a failed pass must not end the control loop
            self._error_log.failed(error)
        self._notify_changed()

    def _notify_changed(self) -> None:
        """Wake everything that waits in `settled`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _reconcile(self) -> None:
        records = self._store.records()
        self._record_losses()
        for replica in self._active():
            if replica.is_ready:
                self._preparations.became_ready(_key(replica))
        states, capacity = self._preparations.states(), self._capacity()
        percents = self._canary_percents(records)
        for action in plan(records, self._active(), states, self._clock(), capacity, percents):
            await self._apply(action)
        records = self._store.records()
        self._record_failures(records)
        self._stored(partial(self._signatures.record, [status for _, status in self._engine.replicas().values()]))
        self._known = {replica.spec.id: replica for replica in self._active()}
        self._publisher.publish(self.routes())
        self._drain_retired()
        self._forget_unused(records)

    def _record_losses(self) -> None:
        running = self._engine.replicas()
        for replica_id in [name for name in self._retiring if name not in running]:
            del self._retiring[replica_id]
        for replica_id, replica in self._known.items():
            if replica_id not in running:
                is_blameless = replica.is_ready or self._infrastructure.was_lost_with_node(replica_id)
                self._preparations.lost(_key(replica), is_blameless)

    async def _apply(self, action: ReplicaAction) -> None:
        match action:
            case Prepare(revision):
                self._preparations.begin(revision)
            case Start(revision):
                await self._start(revision)
            case Retire(replica_id):
                self._retiring[replica_id] = None  # routes first; `_drain_retired` does the rest
            case Configure(replica_id, limits):
                await self._engine.configure(replica_id, limits)
            case Promote(revision):
                if self._stored(partial(self._store.mark_serving, revision.spec.name, revision)):
                    self._logger.info("revision is live", api=revision.spec.name, revision=revision.hash[:8])

    async def _start(self, revision: Revision) -> None:
        prepared = self._preparations.prepared(revision)
        if prepared is None:
            return
        spec = replica_spec(self._home, revision, prepared)
        start = self._async_apis.start if spec.kind == ApiKind.ASYNC else self._engine.start
        try:
            await start(spec)
            self._logger.info("replica started", api=spec.api, replica=spec.id)
            self._in_background(self._prune_logs(), "prune logs")
        except ComputeUnavailableError:
            pass  # a replica that is being stopped still holds the devices; its end triggers the next pass
        except EngineError as error:
            self._preparations.start_failed(revision, error)
            self._logger.error("replica could not be started", api=spec.api, error=error)

    def _record_failures(self, records: Sequence[ApiRecord]) -> None:
        """Store why a revision fails, so that the reason is known while the next attempt runs."""
        states = self._preparations.states()
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
        """Write an observation. While the database is unavailable, the pass continues, and the next pass retries."""
        try:
            write()
        except DatabaseUnavailableError as error:
            self._error_log.failed(error)
            return False
        self._error_log.succeeded()
        return True

    def _drain_retired(self) -> None:
        """Start to drain the retired replicas, which the newest published routes no longer include."""
        running = self._engine.replicas()
        for replica_id in [name for name, task in self._retiring.items() if task is None and name in running]:
            spec, _ = running[replica_id]
            self._logger.info("replica is being retired", api=spec.api, replica=replica_id)
            drain = asyncio.create_task(self._drain_and_stop(spec), name=f"retire {replica_id}")
            self._retiring[replica_id] = drain

    async def _drain_and_stop(self, spec: ReplicaSpec) -> None:
        if spec.kind == ApiKind.ASYNC:
            await self._async_apis.retire(spec)
            return
        deadline = time.monotonic() + spec.timeout_s
        servers = {server_name(spec.id, index) for index in range(len(spec.sockets))}
        try:
            async with asyncio.timeout(_ROUTES_TIMEOUT_S):
                await self._publisher.applied()
            while time.monotonic() < deadline:
                if await self._infrastructure.gateway.drained(servers) >= servers:
                    break
                await asyncio.sleep(_DRAIN_POLL_S)
        except (TimeoutError, GatewayError) as error:
            self._logger.warning("replica stopped without confirmation by the gateway", replica=spec.id, error=error)
        await self._engine.stop(spec.id, spec.timeout_s)

    def _forget_unused(self, records: Sequence[ApiRecord]) -> None:
        revisions = [revision for record in records for revision in record.revisions]
        revisions += self._job_revisions()
        self._preparations.keep_only({(revision.spec.name, revision.hash) for revision in revisions})
        used = {revision.project_hash for revision in revisions} | self._store.history_projects()
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


def _key(replica: Replica) -> RevisionKey:
    return replica.spec.api, replica.spec.revision
