"""Run the APIs of a project once and send them a sample request: `cortex check --sample`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException

from cortex.cli.local_replicas import LocalReplicas, local_replicas
from cortex.client.transport import Answer, describe_error, read
from cortex.config.schema import Api
from cortex.errors import CortexError
from cortex.home import Home
from cortex.operator.deploy.diagnose import Diagnosis
from cortex.processes.http import UnixHttpConnection
from cortex.worker.forks.fork_safety import FINDING
from cortex.worker.requests.calls import logs_hint
from cortex.worker.spec import ReplicaSpec

#: The gateway sets this header, which identifies the request in the response and in the log.
_REQUEST_ID = "x-cortex-request-id"
#: Added to the timeout of the API, after which the supervisor ends the call.
_GRACE_S = 5.0


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
    return asyncio.run(_run_all(home, environ, diagnosis, body, content_type))


async def _run_all(
    home: Home, environ: Mapping[str, str], diagnosis: Diagnosis, body: bytes, content_type: str
) -> list[SampleResult]:
    async with local_replicas(home, environ, diagnosis) as replicas:
        return [await _run_one(replicas, api, body, content_type) for api in diagnosis.apis]


async def _run_one(replicas: LocalReplicas, api: Api, body: bytes, content_type: str) -> SampleResult:
    spec = await replicas.start(api, processes=1)  # enough for one request
    answer = await asyncio.to_thread(_send, spec, body, content_type)
    # The log is in the temporary home, where `cortex logs` does not look.
    text = answer.body.decode(errors="replace").rstrip().replace(logs_hint(api.name), "")
    log = await replicas.stop(spec)
    return SampleResult(api.name, answer.status, text, log, tuple(line for line in log if line.startswith(FINDING)))


def _send(spec: ReplicaSpec, body: bytes, content_type: str) -> Answer:
    connection = UnixHttpConnection(spec.sockets[0], spec.timeout_s + _GRACE_S)
    try:
        connection.request("POST", "/", body, {"content-type": content_type, _REQUEST_ID: "sample"})
        return read(connection.getresponse())
    except (OSError, HTTPException) as error:
        raise CortexError(f"{spec.api} did not respond ({describe_error(error)})") from None
    finally:
        connection.close()
