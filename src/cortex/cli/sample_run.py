"""Run the APIs of a project once and send them a sample request, without operator and gateway.

Implements `cortex check --sample`, with replicas in a temporary home.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from cortex.client.transport import Answer, describe_error, read
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
from cortex.projects.archive import unpack
from cortex.projects.project import pack
from cortex.replica.forks.fork_safety import FINDING
from cortex.replica.requests.calls import logs_hint
from cortex.replica.spec import ProcessStatus, ReplicaSpec, ReplicaStatus, StartFailure
from cortex.state.revision import Target
from cortex.telemetry import Logger

_PROJECT = "project"
_REVISION = "trial"
#: The gateway sets this header, which identifies the request in the response and in the log.
_REQUEST_ID = "x-cortex-request-id"
#: Added to the timeout of the API, after which the supervisor ends the call.
_GRACE_S = 5.0
_STOP_TIMEOUT_S = 10.0
_PAUSE_S = 0.01


@dataclass(frozen=True)
class _TemporaryHome(Home):
    """Temporary home that shares the environments of the real one, so that a later deploy reuses them."""

    environments: Path

    @property
    def environments_dir(self) -> Path:
        return self.environments


@dataclass(frozen=True)
class SampleResult:
    """Response of one API to the sample, and its log."""

    api: str
    status: int
    body: str
    log: tuple[str, ...]  #: with the tracebacks of the user's code
    findings: tuple[str, ...] = ()  #: what does not survive the fork of `handler.preload`


def run_sample(
    home: Home, environ: Mapping[str, str], diagnosis: Diagnosis, body: bytes, content_type: str
) -> list[SampleResult]:
    """Start each API of a project, send it the sample, and stop it.

    Raises: UserError if an API fails to start; InputError, EnvironmentBuildError, StorageError, CortexError.
    """
    try:
        home.environments_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise home.unusable(error) from None
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:
        temporary_home = _TemporaryHome(Path(folder), home.environments_dir)
        temporary_home.create()
        unpack(pack(diagnosis.project), temporary_home.projects_dir / _PROJECT)
        return asyncio.run(_run_all(temporary_home, environ, diagnosis, body, content_type))


async def _run_all(
    home: Home, environ: Mapping[str, str], diagnosis: Diagnosis, body: bytes, content_type: str
) -> list[SampleResult]:
    engine = LocalEngine(home, environ, Logger(__name__))
    model_agent = ModelAgent(home, environ, Logger(__name__))
    try:
        if any(map(loads_models, diagnosis.apis)):
            await model_agent.ensure_running()
        return [await _run_one(engine, home, environ, api, body, content_type) for api in diagnosis.apis]
    finally:
        await _stop(engine)
        await engine.shutdown()
        await model_agent.stop()


async def _run_one(
    engine: LocalEngine, home: Home, environ: Mapping[str, str], api: Api, body: bytes, content_type: str
) -> SampleResult:
    target = Target(_REVISION, api, _PROJECT)
    spec = replica_spec(home, target, await prepare_revision(home, environ, target))
    spec = replace(spec, sockets=spec.sockets[:1])  # one process is enough for one request
    await engine.start(spec)
    while not (status := _status(engine, spec)).is_ready:
        if failure := _failure(status.processes[0]):
            details = failure.traceback or "\n".join(await _complete_log(engine, home, spec))
            raise UserError(f"{api.name} failed to start: {failure.message}", details)
        await asyncio.sleep(_PAUSE_S)
    answer = await asyncio.to_thread(_send, spec, body, content_type)
    # The log is in the temporary home, where `cortex logs` does not look.
    text = answer.body.decode(errors="replace").rstrip().replace(logs_hint(api.name), "")
    log = await _complete_log(engine, home, spec)
    return SampleResult(api.name, answer.status, text, log, tuple(line for line in log if line.startswith(FINDING)))


def _failure(process: ProcessStatus) -> StartFailure | None:
    if process.death and not process.failure:
        return StartFailure(f"its process ended: {process.death.message}")
    return process.failure


async def _complete_log(engine: LocalEngine, home: Home, spec: ReplicaSpec) -> tuple[str, ...]:
    """Stop a replica, after which its log is complete, and return the lines of its processes."""
    await _stop(engine)
    return tuple(line.text for line in read_logs(home.logs_dir / spec.api, spec.id) if line.stream != SUPERVISOR)


async def _stop(engine: LocalEngine) -> None:
    for replica in engine.replicas():
        await engine.stop(replica, 0)
    async with asyncio.timeout(_STOP_TIMEOUT_S):
        while engine.replicas():
            await asyncio.sleep(_PAUSE_S)


def _status(engine: LocalEngine, spec: ReplicaSpec) -> ReplicaStatus:
    if spec.id not in engine.replicas():
        raise CortexError(f"{spec.api}: the replica could not be started")
    return engine.replicas()[spec.id][1]


def _send(spec: ReplicaSpec, body: bytes, content_type: str) -> Answer:
    connection = _ReplicaConnection(spec.sockets[0], spec.timeout_s + _GRACE_S)
    try:
        connection.request("POST", "/", body, {"content-type": content_type, _REQUEST_ID: "sample"})
        return read(connection.getresponse())
    except (OSError, HTTPException) as error:
        raise CortexError(f"{spec.api} did not respond ({describe_error(error)})") from None
    finally:
        connection.close()


class _ReplicaConnection(HTTPConnection):
    """HTTP connection to a replica over its Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("replica", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
