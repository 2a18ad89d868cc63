"""Gateway and replicas while no operator answers: they outlive it. Shows them, and stops them without it."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

from cortex.client.running import is_running, last_operator
from cortex.engine.local import LocalEngine
from cortex.gateway.haproxy import Gateway, GatewaySettings
from cortex.home import Home
from cortex.replica.spec import ReplicaSpec, ReplicaStatus
from cortex.telemetry import Logger

_ANSWER_TIMEOUT_S = 2.0
_DRAIN_S = 5.0
_STOP_TIMEOUT_S = 30.0
_PAUSE_S = 0.02


def observe(home: Home) -> dict[str, Any]:
    """Return what `Client.operator_status` does, with `operator` None, from files and the supervisors themselves."""
    return {"operator": None, "gateway": _gateway(home), "replicas": _replicas(home)}


def stop_leftovers(home: Home) -> bool:
    """Stop every replica and the gateway of a home that no operator watches; return whether any ran."""
    return asyncio.run(_stop(home))


async def _stop(home: Home) -> bool:
    gateway = Gateway(home, GatewaySettings())
    found = _gateway(home) is not None
    await gateway.stop()
    engine = LocalEngine(home, {}, Logger(__name__))
    try:
        await engine.startup()
        for replica in engine.replicas():
            found = True
            await engine.stop(replica, _DRAIN_S)
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            while engine.replicas():
                await asyncio.sleep(_PAUSE_S)
    finally:
        await engine.shutdown()
    return found


def _gateway(home: Home) -> dict[str, Any] | None:
    try:
        pid = int(json.loads((home.run_dir / "gateway" / "identity.json").read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    operator = last_operator(home)
    return {"pid": pid, "url": operator.gateway_url if operator else None} if is_running(pid) else None


def _replicas(home: Home) -> list[dict[str, Any]]:
    found = []
    for file in sorted(home.replicas_dir.glob("*/spec.json")):
        status = _ask(file)
        if status is not None:
            found += _rows(status)
    return found


def _ask(spec_file: Path) -> ReplicaStatus | None:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            connection.connect(ReplicaSpec.read(spec_file).control_socket)
            return ReplicaStatus.from_json(connection.makefile().readline())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rows(status: ReplicaStatus) -> list[dict[str, Any]]:
    return [
        {
            "api": status.api,
            "id": status.id,
            "pid": process.pid,
            "process": process.index,
            "state": process.state.value,
            "revision": status.revision,
            "supervisor_pid": status.supervisor_pid,
            "restarts": process.restarts,
            "last_death": process.death.message if process.death else None,
        }
        for process in status.processes
    ]
