"""Specs of replicas."""

from __future__ import annotations

from typing import Any

from cortex.worker.spec import ReplicaSpec, RequestLimits

_FIELDS: dict[str, Any] = {
    "id": "iris-1-a",
    "api": "iris",
    "revision": "1",
    "interface": "handler",
    "project_dir": "/project",
    "path": "handler.py",
    "python": "python",
    "run_dir": "/run",
    "sockets": ("/s-0",),
    "control_socket": "/s-c",
    "log_path": "/log",
    "timeout_s": 60.0,
    "max_body_bytes": 100 * 1024 * 1024,
    "on_disconnect": "cancel",
    "websocket_idle_s": 3600.0,
}


def replica_spec(**fields: Any) -> ReplicaSpec:
    """Return the spec of a replica with some fields, and with constants for what every replica has."""
    return ReplicaSpec(**(_FIELDS | fields))


def limits(max_body_bytes: int) -> RequestLimits:
    """Return limits of requests, with constants for those that do not matter."""
    return replica_spec(max_body_bytes=max_body_bytes).limits
