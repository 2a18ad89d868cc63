"""What all servers of requests share."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from cortex.worker.applications.application_server import ApplicationServer
from cortex.worker.applications.lifespan import Lifespan
from cortex.worker.commands.command_process import CommandProcess
from cortex.worker.commands.command_server import CommandServer
from cortex.worker.request_server import RequestServer, WorkerContext
from cortex.worker.shared_state import SharedConnectionState
from harness.replicas.specs import replica_spec


async def _application(scope: Any, receive: Any, send: Any) -> None:
    pass


def test_new_limits_reach_a_server_and_its_connections_as_a_whole(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    spec = replica_spec(sockets=(str(tmp_path / "s"),), command=("true",))
    context = WorkerContext(spec, loop, SharedConnectionState())
    servers: list[RequestServer] = [
        ApplicationServer(context, Lifespan(_application)),
        ApplicationServer(replace(context, spec=replace(spec, type="wsgi")), Lifespan(_application)),
        CommandServer(context, CommandProcess(spec, 0), "/socket"),
    ]
    changed = replace(spec.limits, timeout_s=1.5, on_disconnect="finish")
    for server in servers:
        assert (server.limits, server.connections.limits) == (spec.limits, spec.limits)
        server.configure(changed)
        assert server.limits is server.connections.limits is changed
        assert server.timeout_ns == 1_500_000_000
        assert not server.connections.cancels_calls
    loop.close()
