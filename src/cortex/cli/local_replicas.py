"""Replicas of a project on this machine, in a temporary home: without operator and gateway, and nothing is deployed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cortex.config.schema import Api
from cortex.engine.environment import prepare_revision
from cortex.engine.local import LocalEngine
from cortex.engine.log_writer import SUPERVISOR
from cortex.engine.logs import read_logs
from cortex.engine.model_agent import ModelAgent
from cortex.errors import CortexError, UserError
from cortex.home import Home
from cortex.models.source import loads_models
from cortex.operator.deploy.diagnose import Diagnosis
from cortex.operator.revisions.replica_specs import replica_spec
from cortex.projects.archive import unpack
from cortex.projects.project import pack
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.spec import ProcessStatus, ReplicaSpec, ReplicaStatus, StartFailure

_PROJECT = "project"
_REVISION = "trial"
_STOP_TIMEOUT_S = 10.0
_PAUSE_S = 0.01


@dataclass(frozen=True)
class _TemporaryHome(Home):
    """Temporary home that shares the environments of the real one, so that a later deploy reuses them."""

    environments: Path

    @property
    def environments_dir(self) -> Path:
        return self.environments


class LocalReplicas:
    """Starts replicas of the APIs of one project, one after the other."""

    def __init__(self, home: Home, environ: Mapping[str, str]) -> None:
        self._home = home
        self._environ = environ
        self._engine = LocalEngine(home, environ, Logger(__name__))
        self._model_agent = ModelAgent(home, environ, Logger(__name__))

    async def start(self, api: Api, processes: int | None = None) -> ReplicaSpec:
        """Start a replica of an API, with all of its processes or the given number; return once it is ready.

        It records no requests.

        Raises: UserError if it fails to start; EnvironmentBuildError, StorageError, CortexError.
        """
        if loads_models(api):
            await self._model_agent.ensure_running()
        revision = Revision(_REVISION, api, _PROJECT)
        spec = replica_spec(self._home, revision, await prepare_revision(self._home, self._environ, revision))
        spec = replace(spec, sockets=spec.sockets[:processes], record_share=0.0)
        await self._engine.start(spec)
        while not (status := self._status(spec)).is_ready:
            if failure := _failure(status.processes[0]):
                details = failure.traceback or "\n".join(await self.stop(spec))
                raise UserError(f"{api.name} failed to start: {failure.message}", details)
            await asyncio.sleep(_PAUSE_S)
        return spec

    async def stop(self, spec: ReplicaSpec) -> tuple[str, ...]:
        """Stop a replica, after which its log is complete, and return the lines of its processes."""
        await self.stop_all()
        log = read_logs(self._home.logs_dir / spec.api, spec.id)
        return tuple(line.text for line in log if line.stream != SUPERVISOR)

    async def stop_all(self) -> None:
        """Stop all replicas."""
        for replica in self._engine.replicas():
            await self._engine.stop(replica, 0)
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            while self._engine.replicas():
                await asyncio.sleep(_PAUSE_S)

    async def shutdown(self) -> None:
        """Stop everything."""
        await self.stop_all()
        await self._engine.shutdown()
        await self._model_agent.stop()

    def _status(self, spec: ReplicaSpec) -> ReplicaStatus:
        if spec.id not in self._engine.replicas():
            raise CortexError(f"{spec.api}: the replica could not be started")
        return self._engine.replicas()[spec.id][1]


def _failure(process: ProcessStatus) -> StartFailure | None:
    if process.death and not process.failure:
        return StartFailure(f"its process ended: {process.death.message}")
    return process.failure


@asynccontextmanager
async def local_replicas(home: Home, environ: Mapping[str, str], diagnosis: Diagnosis) -> AsyncIterator[LocalReplicas]:
    """Unpack a project into a temporary home, and stop its replicas at the end. Raises: InputError."""
    home.check()
    try:
        home.environments_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise home.unusable(error) from None
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:
        temporary_home = _TemporaryHome(Path(folder), home.environments_dir)
        temporary_home.create()
        unpack(pack(diagnosis.project), temporary_home.projects_dir / _PROJECT)
        replicas = LocalReplicas(temporary_home, environ)
        try:
            yield replicas
        finally:
            await replicas.shutdown()
