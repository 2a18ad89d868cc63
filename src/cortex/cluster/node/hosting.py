"""Hosting of the replicas of one node: prepare each, start it through the node's engine, watch it until it ends.

Independent of operators and connections; an observer gets each change.

    start() --> PREPARING --> engine.start() --> RUNNING (in the engine) --> ended: metrics remain --> forget()
                   |  ^
                   +--+ a failure is reported in the status, and retried with backoff
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.cluster.archives import validate_project_hash
from cortex.engine.base import Engine
from cortex.engine.environment import install_log, preparation_failure, prepare_setup
from cortex.engine.local import first_status
from cortex.engine.log_writer import STDOUT, LogWriter
from cortex.engine.logs import prune
from cortex.errors import CortexError, EngineError, InputError
from cortex.home import Home
from cortex.processes.backoff import Backoff
from cortex.projects.archive import archive_hash, unpack
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaSpec, ReplicaStatus, RequestLimits

if TYPE_CHECKING:
    from cortex.cluster.node.agent import NodeAgent

_BACKOFF = Backoff(5.0, 300.0)
#: An unused project is kept for this long: a rollback often needs it again.
_UNUSED_PROJECT_S = 3600.0
#: A project is requested again after this time; another operator may lead by then.
REQUEST_AGAIN_S = 3.0


@dataclass
class _Preparing:
    """A replica that the engine does not have yet."""

    spec: ReplicaSpec
    status: ReplicaStatus
    task: asyncio.Task[None] | None = None


class Hosting:
    """All replicas of one node, including those being prepared."""

    def __init__(
        self,
        home: Home,
        host: str,
        environ: Mapping[str, str],
        engine: Engine,
        observer: NodeAgent,
        logger: Logger,
    ) -> None:
        self._home = home
        self._host = host
        self._environ = environ
        self._engine = engine
        self._observer = observer
        self._logger = logger
        self._preparing: dict[str, _Preparing] = {}
        self._reported: dict[str, ReplicaStatus] = {}
        self._project_arrived = asyncio.Event()
        self._project_problems: dict[str, str] = {}  #: by hash, why the last request for it failed
        self._ended: set[str] = set()  #: replicas whose metrics are final, though their folders may still exist

    async def startup(self) -> None:
        """Adopt running replicas."""
        await self._engine.startup(self._report_changes, self._on_end)
        self._report_changes()

    async def shutdown(self) -> None:
        """Stop watching. Replicas run on; preparations are cancelled."""
        for preparing in self._preparing.values():
            if preparing.task:
                preparing.task.cancel()
        await self._engine.shutdown()

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return every replica with its newest status."""
        preparing = {name: (each.spec, each.status) for name, each in self._preparing.items()}
        return preparing | self._engine.replicas()

    def ended(self) -> list[str]:
        """Return the replicas that ended and whose metrics are still here.

        Workers end after a supervisor that is killed and count until then: while the replica's folder is there.
        """
        here, runs = self.replicas(), self._home.replicas_dir
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(self._home.metrics_dir) if name not in here)  # noqa: PTH208
            return [name for name in names if name in self._ended or not (runs / name).exists()]
        return []

    def start(self, spec: ReplicaSpec) -> None:
        """Prepare and start a replica. Does nothing if it exists."""
        if spec.id in self.replicas():
            return
        preparing = _Preparing(spec, first_status(spec, 0))
        self._preparing[spec.id] = preparing
        preparing.task = asyncio.create_task(self._bring_up(preparing), name=f"bring up {spec.id}")
        self._observer.changed(spec.id)

    async def stop(self, replica_id: str, drain_s: float) -> None:
        """Stop a replica. Unknown ids are ignored."""
        preparing = self._preparing.pop(replica_id, None)
        if preparing is not None and preparing.task is not None:
            preparing.task.cancel()
            await asyncio.gather(preparing.task, return_exceptions=True)
            self._observer.changed(replica_id)
        await self._engine.stop(replica_id, drain_s)

    async def configure(self, replica_id: str, limits: RequestLimits) -> None:
        """Change the limits of a replica. Unknown ids are ignored."""
        if replica_id in self._preparing:
            self._preparing[replica_id].spec = self._preparing[replica_id].spec.with_limits(limits)
        await self._engine.configure(replica_id, limits)

    def forget(self, replica_id: str) -> None:
        """Delete the metrics of a replica that ended."""
        if replica_id in self.ended():
            shutil.rmtree(self._home.metrics_dir / replica_id, ignore_errors=True)
            self._ended.discard(replica_id)

    async def add_project(self, project_hash: str, archive: bytes, digest: str) -> None:
        """Unpack a project unless it exists. Raises: InputError if the archive has another digest; OSError."""
        place = self._home.projects_dir / validate_project_hash(project_hash)
        part = place.with_name(f".part-{project_hash}-{os.getpid()}-{time.monotonic_ns()}")
        try:
            await asyncio.to_thread(_unpack_verified, archive, part, digest)
            try:
                part.rename(place)
            except OSError:
                if not place.is_dir():  # else another upload was first
                    raise
        finally:
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        self._wake_waiting()

    def fail_project(self, project_hash: str, reason: str) -> None:
        """Record why a project can't be sent: waiting replicas report it, and request it again later."""
        self._project_problems[project_hash] = reason
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        self._project_arrived.set()
        self._project_arrived = asyncio.Event()

    async def clean(self) -> None:
        """Delete unused projects, and the logs of replicas that ended long ago."""
        replicas = self.replicas()
        used = {Path(spec.project_dir).name for spec, _ in replicas.values()}
        await asyncio.to_thread(self._clean, used, set(replicas))

    def _clean(self, used: set[str], replicas: set[str]) -> None:
        old = time.time() - _UNUSED_PROJECT_S
        with contextlib.suppress(OSError):
            for folder in self._home.projects_dir.iterdir():
                if folder.name not in used and folder.stat().st_mtime < old:
                    shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            prune(self._home.logs_dir, replicas)

    async def _bring_up(self, preparing: _Preparing) -> None:
        """Retry until it runs: a package index or a store may be down for a while."""
        attempts = 0
        while True:
            try:
                await self._wait_for_project(preparing.spec.project_dir)
                spec = await self._prepare(preparing.spec)
                await self._engine.start(spec)
            except CortexError as error:
                attempts += 1
                self._logger.warning("replica can't be started", replica=preparing.spec.id, error=error)
                self._fail(preparing, str(error), error, attempts)
            except Exception as error:  # report and retry any failure
                attempts += 1
                self._logger.error("replica can't be started", exc_info=error, replica=preparing.spec.id)
                self._fail(preparing, f"{type(error).__name__}: {error}", error, attempts)
            else:
                self._preparing.pop(spec.id, None)
                self._report_changes()
                return
            await asyncio.sleep(_BACKOFF.delay_s(attempts))

    async def _wait_for_project(self, project_dir: str) -> None:
        place = Path(project_dir)
        while not place.is_dir():
            arrived = self._project_arrived
            self._project_problems.pop(place.name, None)
            self._observer.needs_project(place.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REQUEST_AGAIN_S):
                    await arrived.wait()
            if problem := self._project_problems.get(place.name):
                raise EngineError(f"the operator can't send the project: {problem}")
        os.utime(place)

    async def _prepare(self, spec: ReplicaSpec) -> ReplicaSpec:
        if spec.setup is None:
            return spec
        log = LogWriter(install_log(self._home, spec.api, spec.revision))
        try:
            prepared = await prepare_setup(
                self._home, self._environ, spec.setup, lambda line: log.line(0, STDOUT, line)
            )
        finally:
            log.close()
        return replace(spec, python=prepared.python, env=dict(prepared.env), model_path=prepared.model_path)

    def _fail(self, preparing: _Preparing, message: str, error: Exception, attempts: int) -> None:
        # The node has the files that the message names.
        failure = preparation_failure(f"node {self._host}: {message}", error)
        processes = tuple(
            replace(process, failed_starts=attempts, failure=failure) for process in preparing.status.processes
        )
        preparing.status = replace(preparing.status, processes=processes)
        self._observer.changed(preparing.spec.id)

    def _report_changes(self) -> None:
        now = {name: status for name, (_, status) in self.replicas().items()}
        before, self._reported = self._reported, now
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                self._observer.changed(name)

    def _on_end(self, folder: Path) -> None:
        if folder.is_dir():
            self._ended.add(folder.name)
        self._observer.changed(folder.name)


def _unpack_verified(archive: bytes, place: Path, digest: str) -> None:
    if archive_hash(archive) != digest:
        raise InputError("the received project does not match its announced digest")
    unpack(archive, place)
