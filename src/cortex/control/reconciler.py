"""Makes what runs become what is wanted: load, plan (pure), apply, again after each change.

Knows engine, gateway and store by their protocols; what to do is decided in `plan.py`, `routing.py`, `status.py`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cortex.control.plan import Action, Configure, Preparation, Prepare, Promote, Replica, Retire, Start, plan
from cortex.control.preparations import Key, Preparations, Prepared
from cortex.control.projects import ProjectFolders
from cortex.control.publisher import Gateway, RoutePublisher
from cortex.control.room import Room
from cortex.control.routing import routes_of, server_name
from cortex.control.status import ApiState, failure_of, lack_of, status_of
from cortex.engine.base import Engine
from cortex.engine.logs import prune as prune_logs
from cortex.errors import ComputeUnavailableError, EngineError, GatewayError
from cortex.gateway.routes import RoutingTable
from cortex.home import Home
from cortex.lifecycle import ApiStatus, ProcessState
from cortex.models.source import loads_models, model_source
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
        self._preparations = Preparations(prepare, self.wake, clock, logger)
        self.publisher = RoutePublisher(gateway, self._tell_changed, logger)
        self._awake = asyncio.Event()
        self._changed = asyncio.Event()
        self._retiring: dict[str, asyncio.Task[None] | None] = {}
        self._known: dict[str, Replica] = {}
        self._used_projects: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()

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
            await self._preparations.shutdown()

    def state(self, record: ApiRecord) -> ApiState:
        """Return how an API is now."""
        mine = [replica for replica in self._replicas() if replica.spec.api == record.name]
        active = [replica for replica in mine if self._is_active(replica)]
        leaving = [replica for replica in mine if not self._is_active(replica)]
        preparation = self._states([record]).get((record.name, record.revision), Preparation())
        return status_of(record, active, leaving, preparation, datetime.fromtimestamp(self._clock(), UTC))

    def statuses(self, name: str) -> list[ReplicaStatus]:
        """Return how the replicas of an API are that are not being stopped."""
        return [replica.status for replica in self._active() if replica.spec.api == name]

    def routes(self) -> RoutingTable:
        """Return the routes to what runs now."""
        records = self._store.records()
        return routes_of(records, self._active(), self._states(records))

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
        routes_follow = self.publisher.is_settled and not self._awake.is_set()
        return routes_follow and (record is None or self.state(record).status is not ApiStatus.UPDATING)

    def _replicas(self) -> list[Replica]:
        return [Replica(spec, status) for spec, status in self._engine.replicas().values()]

    def _is_active(self, replica: Replica) -> bool:
        is_leaving = any(process.state in _LEAVING for process in replica.status.processes)
        return replica.spec.id not in self._retiring and not is_leaving

    def _active(self) -> list[Replica]:
        return [replica for replica in self._replicas() if self._is_active(replica)]

    def _room(self) -> Room:
        return Room.of(self._engine.devices(), [replica.spec for replica in self._active()])

    def _states(self, records: Sequence[ApiRecord]) -> dict[Key, Preparation]:
        """Return how far each revision is, and what the newest of `records` lack."""
        states, active, room = self._preparations.states(), self._active(), self._room()
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
            self._logger.error("reconciling failed", exc_info=error)
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
                self._preparations.became_ready(_key(replica))
        actions = plan(records, self._active(), self._preparations.states(), self._clock(), self._room())
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
                self._preparations.begin(target)
            case Start(target):
                await self._start(target)
            case Retire(replica_id):
                self._retiring[replica_id] = None  # out of the routes first; `_retire` does the rest
            case Configure(replica_id, limits):
                await self._engine.configure(replica_id, limits)
            case Promote(target):
                self._store.mark_serving(target.spec.name, target)
                self._logger.info("revision is live", api=target.spec.name, revision=target.revision[:8])

    async def _start(self, target: Target) -> None:
        prepared = self._preparations.prepared(target)
        if prepared is None:
            return
        spec = replica_spec(self._home, target, prepared)
        try:
            await self._engine.start(spec)
            self._logger.info("replica started", api=spec.api, replica=spec.id)
            self._in_background(self._prune_logs(), "prune logs")
        except ComputeUnavailableError:
            pass  # a replica that is being stopped still holds what it needs; its end wakes us
        except EngineError as error:
            self._preparations.start_failed(target, error)
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
                self._preparations.lost(_key(replica), was_ready=replica.is_ready)

    def _record_failures(self, records: Sequence[ApiRecord]) -> None:
        """Keep why a revision fails, so that it is still known while the next attempt runs."""
        states = self._preparations.states()
        for record in records:
            newest = [r for r in self._active() if _key(r) == (record.name, record.revision)]
            preparation = states.get((record.name, record.revision), Preparation())
            failure = failure_of(replace(record, failure=None), newest, preparation)
            if failure is None:
                continue
            stored = StoredFailure(failure.message, failure.traceback)
            if stored != record.failure:
                self._store.mark_failed(record.name, record.revision, stored)
                self._logger.warning("revision fails", api=record.name, error=failure.message)

    def _forget_unused(self, records: Sequence[ApiRecord]) -> None:
        targets = [target for record in records for target in (record.target, record.serving) if target]
        self._preparations.keep_only({(target.spec.name, target.revision) for target in targets})
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


def replica_spec(home: Home, target: Target, prepared: Prepared) -> ReplicaSpec:
    """Return the spec of a new replica of `target`, with an id and sockets of its own."""
    api = target.spec
    handler, unique = api.handler, secrets.token_hex(3)
    replica_id = f"{api.name}-{target.revision[:8]}-{unique}"
    sockets = home.sockets_dir / secrets.token_hex(5)  # short: socket paths may have 104 characters
    processes = handler.processes_per_replica
    project_dir = home.projects_dir / target.project_hash
    return ReplicaSpec(
        id=replica_id,
        api=api.name,
        revision=target.revision,
        interface=handler.interface,
        project_dir=str(project_dir),
        path=handler.path,
        python=prepared.python,
        run_dir=str(home.replicas_dir / replica_id),
        sockets=tuple(f"{sockets}-{index}" for index in range(processes)),
        control_socket=f"{sockets}-c",
        log_path=str(home.logs_dir / api.name / f"{replica_id}.log"),
        python_path=handler.python_path,
        config=handler.config,
        model_path=prepared.model_path,
        env=dict(prepared.env),
        threads=handler.threads_per_process,
        max_concurrency=max(1, api.autoscaling.max_replica_concurrency // processes),
        timeout_s=api.networking.timeout_s,
        max_body_bytes=api.networking.max_body_size,
        mem_limit_bytes=api.compute.mem_limit,
        log_level=handler.log_level,
        type=handler.type,
        models=model_source(api, project_dir),
        model_agent_socket=str(home.model_agent_socket) if loads_models(api) else None,
        tensorflow_serving=handler.tensorflow_serving,
        gpu=api.compute.gpu,
        inf=api.compute.inf,
    )


def _key(replica: Replica) -> Key:
    return replica.spec.api, replica.spec.revision
