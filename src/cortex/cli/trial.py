"""Runs a project once, in a replica of its own and without operator or gateway, to see what it answers to a sample."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from cortex.client.transport import Answer, read, reason
from cortex.config.archive import unpack
from cortex.config.project import pack
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
from cortex.operator.replicas.replica_specs import replica_spec
from cortex.replica.spec import ReplicaSpec, ReplicaStatus
from cortex.state.apis import Target
from cortex.telemetry import Logger

_PROJECT = "project"
_REVISION = "trial"
#: What the gateway would send, so that answer and log name the request.
_REQUEST_ID = "x-cortex-request-id"
#: On top of the API's own timeout, after which its supervisor ends the call.
_GRACE_S = 5.0
_STOP_TIMEOUT_S = 10.0
_PAUSE_S = 0.01


@dataclass(frozen=True)
class _TrialHome(Home):
    """A home that goes away; only environments are those of the real one, built once for trial and deploy."""

    environments: Path

    @property
    def environments_dir(self) -> Path:
        return self.environments


@dataclass(frozen=True)
class Trial:
    """What came of one API: its answer to the sample, and what it printed."""

    api: str
    answer: Answer
    log: tuple[str, ...]


def try_sample(
    home: Home, environ: Mapping[str, str], diagnosis: Diagnosis, body: bytes, content_type: str
) -> list[Trial]:
    """Start each API of a project, send it the sample, stop it.

    Raises: UserError if one does not start; InputError, EnvironmentBuildError, StorageError, CortexError.
    """
    try:
        home.environments_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise home.unusable(error) from None
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:
        trial_home = _TrialHome(Path(folder), home.environments_dir)
        trial_home.create()
        unpack(pack(diagnosis.project), trial_home.projects_dir / _PROJECT)
        return asyncio.run(_try_all(trial_home, environ, diagnosis, body, content_type))


async def _try_all(
    home: Home, environ: Mapping[str, str], diagnosis: Diagnosis, body: bytes, content_type: str
) -> list[Trial]:
    engine = LocalEngine(home, environ, Logger(__name__))
    model_agent = ModelAgent(home, environ, Logger(__name__))
    try:
        if any(map(loads_models, diagnosis.apis)):
            await model_agent.ensure_running()
        return [await _try(engine, home, environ, api, body, content_type) for api in diagnosis.apis]
    finally:
        await _stop(engine)
        await engine.shutdown()
        await model_agent.stop()


async def _try(
    engine: LocalEngine, home: Home, environ: Mapping[str, str], api: Api, body: bytes, content_type: str
) -> Trial:
    target = Target(_REVISION, api, _PROJECT)
    spec = replica_spec(home, target, await prepare_revision(home, environ, target))
    spec = replace(spec, sockets=spec.sockets[:1])  # one process answers one request
    await engine.start(spec)
    while not (status := _status(engine, spec)).is_ready:
        _check_started(api.name, status)
        await asyncio.sleep(_PAUSE_S)
    answer = await asyncio.to_thread(_ask, spec, body, content_type)
    await _stop(engine)  # its log is complete then
    lines = read_logs(home.logs_dir / api.name, spec.id)
    log = tuple(line.text for line in lines if line.stream != SUPERVISOR)
    return Trial(api.name, answer, log)


async def _stop(engine: LocalEngine) -> None:
    for replica in engine.replicas():
        await engine.stop(replica, 0)
    async with asyncio.timeout(_STOP_TIMEOUT_S):
        while engine.replicas():
            await asyncio.sleep(_PAUSE_S)


def _status(engine: LocalEngine, spec: ReplicaSpec) -> ReplicaStatus:
    if spec.id not in engine.replicas():
        raise CortexError(f"{spec.api}: its replica could not be started")
    return engine.replicas()[spec.id][1]


def _check_started(api: str, status: ReplicaStatus) -> None:
    process = status.processes[0]
    if process.failure:
        raise UserError(f"{api} does not start: {process.failure.message}", process.failure.traceback)
    if process.death:
        raise UserError(f"{api} does not start: its process ended: {process.death.message}")


def _ask(spec: ReplicaSpec, body: bytes, content_type: str) -> Answer:
    connection = _UnixConnection(spec.sockets[0], spec.timeout_s + _GRACE_S)
    try:
        connection.request("POST", "/", body, {"content-type": content_type, _REQUEST_ID: "sample"})
        return read(connection.getresponse())
    except (OSError, HTTPException) as error:
        raise CortexError(f"{spec.api} gave no answer ({reason(error)})") from None
    finally:
        connection.close()


class _UnixConnection(HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("replica", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
