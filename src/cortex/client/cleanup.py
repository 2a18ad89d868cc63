"""Stop or inspect all processes of one home, also without an operator.

Gateway, model agent and replicas continue to run if the operator ends, so that they are found by their files.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cortex.client.environments import connect_local
from cortex.engine.local import LocalEngine
from cortex.engine.model_agent import ModelAgent, model_agent_file
from cortex.errors import ConflictError, CortexError
from cortex.gateway.config import GatewaySettings
from cortex.gateway.haproxy import HaproxyGateway
from cortex.home import Home
from cortex.installation import OperatorIdentity, last_operator, operator_file, read_operator
from cortex.processes.identity import Identity
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaSpec, ReplicaStatus

_STATUS_TIMEOUT_S = 2.0
_SHUTDOWN_REQUEST_TIMEOUT_S = 5.0
_OPERATOR_STOP_TIMEOUT_S = 60.0  #: it first drains requests
_TERM_TIMEOUT_S = 5.0
_DRAIN_S = 5.0
_STOP_TIMEOUT_S = 30.0
_PAUSE_S = 0.02


def inspect_processes(home: Home) -> dict[str, Any]:
    """Return the form of `Client.operator_status` from files and the supervisors' status.

    `operator` is None, or describes a process that lives and does not answer, with `is_answering` False.
    """
    operator = read_operator(home)
    return {
        "operator": operator and {"pid": operator.pid, "url": operator.url, "is_answering": False},
        "gateway": _gateway(home),
        "models": _model_agent(home),
        "replicas": _replicas(home),
    }


def stop_all(home: Home, drain_s: float = _DRAIN_S) -> bool:
    """Stop operator, gateway, model agent and all replicas; return whether any of them was running.

    `drain_s`: drain time of replicas that the operator has not stopped.
    """
    if not home.run_dir.is_dir():
        return False
    found = _stop_operator(home, stops_all=True)
    found = asyncio.run(_stop_rest(home, drain_s)) or found
    operator_file(home).unlink(missing_ok=True)
    return found


def stop_operator(home: Home) -> bool:
    """Stop only the operator; gateway, model agent and replicas continue to run. Return whether it was running.

    Raises: ConflictError if everything else would end with it.
    """
    operator = read_operator(home)
    if operator is not None and "--stop-all" in operator.command:
        raise ConflictError(
            "the operator was started with `cortex up --foreground --stop-all`, so everything ends with it; "
            "stop that command, or run `cortex down`"
        )
    return _stop_operator(home, stops_all=False)


def _stop_operator(home: Home, stops_all: bool) -> bool:
    operator = read_operator(home)
    if operator is None:
        return False
    query = {"all": stops_all}
    try:
        connect_local(home).call("POST", "/v1/shutdown", query=query, timeout_s=_SHUTDOWN_REQUEST_TIMEOUT_S)
        timeout_s = _OPERATOR_STOP_TIMEOUT_S
    except CortexError:
        _signal(operator, signal.SIGTERM)  # it does not respond, and leaves the rest running
        timeout_s = _TERM_TIMEOUT_S
    if not _wait_until_gone(operator, timeout_s):
        _signal(operator, signal.SIGKILL)
        _wait_until_gone(operator, _TERM_TIMEOUT_S)
    return True


def _signal(operator: OperatorIdentity, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(operator.pid, number)


def _wait_until_gone(operator: OperatorIdentity, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while operator.is_running():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


async def _stop_rest(home: Home, drain_s: float) -> bool:
    gateway = HaproxyGateway(home, GatewaySettings())
    found = _gateway(home) is not None or _model_agent(home) is not None
    await gateway.stop()
    engine = LocalEngine(home, {}, Logger(__name__))
    try:
        # The metrics stay: the next operator aggregates them.
        await engine.startup(on_change=lambda: None, on_end=lambda spec: None)
        for replica in engine.replicas():
            found = True
            await engine.stop(replica, drain_s)
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            while engine.replicas():
                await asyncio.sleep(_PAUSE_S)
    finally:
        await engine.shutdown()
    await ModelAgent(home, {}, Logger(__name__)).stop()
    return found


def _gateway(home: Home) -> dict[str, Any] | None:
    identity = Identity.read(home.run_dir / "gateway" / "identity.json")
    if identity is None or not identity.is_alive():
        return None
    operator = last_operator(home)
    return {"pid": identity.pid, "url": operator.gateway_url if operator else None}


def _model_agent(home: Home) -> dict[str, Any] | None:
    identity = Identity.read(model_agent_file(home))
    return {"pid": identity.pid} if identity and identity.is_alive() else None


def _replicas(home: Home) -> list[dict[str, Any]]:
    found = []
    for file in sorted(home.replicas_dir.glob("*/spec.json")):
        status = _replica_status(file)
        if status is not None:
            found += status.describe_processes()
    return found


def _replica_status(spec_file: Path) -> ReplicaStatus | None:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_STATUS_TIMEOUT_S)
            connection.connect(ReplicaSpec.read(spec_file).control_socket)
            return ReplicaStatus.from_json(connection.makefile().readline())
    except (OSError, ValueError, KeyError, TypeError):
        return None
