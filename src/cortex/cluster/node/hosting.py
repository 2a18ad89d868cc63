"""The replicas on one node: each is prepared, started through the node's engine, and watched until it has ended.

Knows nothing of operators and connections; whoever owns it is told of each change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cortex.cluster.archives import checked_hash
from cortex.config.archive import archive_hash, unpack
from cortex.engine.base import Engine
from cortex.engine.environment import install_log, prepare_setup
from cortex.engine.local import first_status
from cortex.engine.log_writer import STDOUT, LogWriter
from cortex.engine.logs import prune
from cortex.errors import CortexError, EngineError, InputError
from cortex.home import Home
from cortex.replica.spec import Failure, Limits, ReplicaSpec, ReplicaStatus
from cortex.telemetry import Logger

FIRST_RETRY_S = 5.0
MAX_RETRY_S = 300.0
#: A project that no replica uses is kept for so long: the next deploy often is the one before.
_UNUSED_PROJECT_S = 3600.0
#: Who is asked for a project may be gone, or have just come.
ASK_AGAIN_S = 3.0


class Listener(Protocol):
    """Who is told what changes."""

    def changed(self, replica_id: str) -> None:
        """Learn that a replica has another status, or is there no more."""

    def needs_project(self, project_hash: str) -> None:
        """Learn that replicas wait for a project."""


@dataclass
class _Hosted:
    """A replica that is wanted here and that the engine does not have yet."""

    spec: ReplicaSpec
    status: ReplicaStatus
    task: asyncio.Task[None] | None = None


class Hosting:
    """All replicas of one node, those that are being prepared included."""

    def __init__(
        self,
        home: Home,
        host: str,
        environ: Mapping[str, str],
        engine: Engine,
        listener: Listener,
        logger: Logger,
    ) -> None:
        self._home = home
        self._host = host
        self._environ = environ
        self._engine = engine
        self._listener = listener
        self._logger = logger
        self._coming: dict[str, _Hosted] = {}
        self._told: dict[str, ReplicaStatus] = {}
        self._project_came = asyncio.Event()
        self._project_problems: dict[str, str] = {}  #: by hash, of the last time that it was asked for
        self._over: set[str] = set()  #: replicas that count no more, though they may not be cleaned up yet
        engine.on_change = self._look
        engine.on_end = self._ended

    async def startup(self) -> None:
        """Take up what runs."""
        await self._engine.startup()
        self._look()

    async def shutdown(self) -> None:
        """Let go of what runs; what is being prepared is given up."""
        for hosted in self._coming.values():
            if hosted.task:
                hosted.task.cancel()
        await self._engine.shutdown()

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return every replica with its newest status."""
        coming = {name: (hosted.spec, hosted.status) for name, hosted in self._coming.items()}
        return coming | self._engine.replicas()

    def ended(self) -> list[str]:
        """Return the replicas that are over and whose numbers nobody has fetched yet.

        Workers may outlive their supervisor, and count still: so long as its folder is there, they may.
        """
        here, runs = self.replicas(), self._home.replicas_dir
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(self._home.metrics_dir) if name not in here)  # noqa: PTH208
            return [name for name in names if name in self._over or not (runs / name).exists()]
        return []

    def start(self, spec: ReplicaSpec) -> None:
        """Prepare and start a replica; one that is here already is left as it is."""
        if spec.id in self.replicas():
            return
        hosted = _Hosted(spec, first_status(spec, 0))
        self._coming[spec.id] = hosted
        hosted.task = asyncio.create_task(self._bring_up(hosted), name=f"bring up {spec.id}")
        self._listener.changed(spec.id)

    async def stop(self, replica_id: str, drain_s: float) -> None:
        """Stop a replica. Unknown ids are ignored."""
        hosted = self._coming.pop(replica_id, None)
        if hosted is not None and hosted.task is not None:
            hosted.task.cancel()
            await asyncio.gather(hosted.task, return_exceptions=True)
            self._listener.changed(replica_id)
        await self._engine.stop(replica_id, drain_s)

    async def configure(self, replica_id: str, limits: Limits) -> None:
        """Change the limits of a replica. Unknown ids are ignored."""
        if replica_id in self._coming:
            self._coming[replica_id].spec = self._coming[replica_id].spec.with_limits(limits)
        await self._engine.configure(replica_id, limits)

    def forget(self, replica_id: str) -> None:
        """Remove what is left of a replica that ended."""
        if replica_id in self.ended():
            shutil.rmtree(self._home.metrics_dir / replica_id, ignore_errors=True)
            self._over.discard(replica_id)

    async def add_project(self, project_hash: str, archive: bytes, digest: str) -> None:
        """Unpack a project, unless it is here. Raises: InputError if the archive does not have that digest; OSError."""
        place = self._home.projects_dir / checked_hash(project_hash)
        part = place.with_name(f".part-{project_hash}-{os.getpid()}-{time.monotonic_ns()}")
        try:
            await asyncio.to_thread(_unpack_checked, archive, part, digest)
            try:
                part.rename(place)
            except OSError:
                if not place.is_dir():  # else another was first
                    raise
        finally:
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        self._wake_for_projects()

    def fail_project(self, project_hash: str, reason: str) -> None:
        """Learn why a project does not come: replicas that wait for it say so, and ask again later."""
        self._project_problems[project_hash] = reason
        self._wake_for_projects()

    def _wake_for_projects(self) -> None:
        self._project_came.set()
        self._project_came = asyncio.Event()

    async def clean(self) -> None:
        """Remove logs and projects that were of replicas long gone."""
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

    async def _bring_up(self, hosted: _Hosted) -> None:
        """Try until it runs: what is lacking may come, and an index or a store that is down may be up again."""
        attempts = 0
        while True:
            try:
                await self._have_project(hosted.spec.project_dir)
                spec = await self._prepared(hosted.spec)
                await self._engine.start(spec)
            except CortexError as error:
                attempts += 1
                self._logger.warning("replica can't be started", replica=hosted.spec.id, error=error)
                self._fail(hosted, str(error), attempts)
            except Exception as error:  # whatever it is, it must be told, and tried again
                attempts += 1
                self._logger.error("replica can't be started", exc_info=error, replica=hosted.spec.id)
                self._fail(hosted, f"{type(error).__name__}: {error}", attempts)
            else:
                self._coming.pop(spec.id, None)
                self._look()
                return
            await asyncio.sleep(min(FIRST_RETRY_S * 2.0 ** min(attempts - 1, 10), MAX_RETRY_S))

    async def _have_project(self, project_dir: str) -> None:
        place = Path(project_dir)
        while not place.is_dir():
            came = self._project_came
            self._project_problems.pop(place.name, None)
            self._listener.needs_project(place.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_S):
                    await came.wait()
            if problem := self._project_problems.get(place.name):
                raise EngineError(f"the project can't be had: {problem}")
        os.utime(place)

    async def _prepared(self, spec: ReplicaSpec) -> ReplicaSpec:
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

    def _fail(self, hosted: _Hosted, message: str, attempts: int) -> None:
        failure = Failure(f"node {self._host}: {message}")  # where its files are, the log of an installation among them
        processes = tuple(
            replace(process, failed_starts=attempts, failure=failure) for process in hosted.status.processes
        )
        hosted.status = replace(hosted.status, processes=processes)
        self._listener.changed(hosted.spec.id)

    def _look(self) -> None:
        """Tell of each replica that is not as it was."""
        now = {name: status for name, (_, status) in self.replicas().items()}
        before, self._told = self._told, now
        for name in _differing(before, now):
            self._listener.changed(name)

    def _ended(self, spec: ReplicaSpec) -> None:
        if Path(spec.metrics_dir).is_dir():
            self._over.add(spec.id)
        self._listener.changed(spec.id)


def _differing(before: Mapping[str, ReplicaStatus], now: Mapping[str, ReplicaStatus]) -> Iterable[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _unpack_checked(archive: bytes, place: Path, digest: str) -> None:
    if archive_hash(archive) != digest:
        raise InputError("the project that came is not the one that was announced")
    unpack(archive, place)
