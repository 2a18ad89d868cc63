"""Sends the lines of a node's logs to the operator: those there are, and those that are written from then on."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path

from cortex.cluster.transport import Json, Wire
from cortex.engine.logs import LocalLogs
from cortex.gateway.access_log import LocalAccess

_BATCH = 500


async def send_access(wire: Wire, logs_dir: Path, request: Json) -> None:
    """Send the lines of the gateway's access log that `request` asks for; see `gateway.access_source`.

    Raises: WireError once nobody listens.
    """
    name = request.get("request")
    lines = LocalAccess(logs_dir).access(
        str(request["api"]), None if name is None else str(name), int(request["tail"]), bool(request["follow"])
    )
    async with contextlib.aclosing(lines):
        async for found in lines:
            for start in range(0, max(len(found), 1), _BATCH):
                wire.send({"lines": found[start : start + _BATCH], "more": start + _BATCH < len(found)})
                await wire.drain()
            if wire.reader.at_eof() or wire.writer.is_closing():
                return
    wire.send({"end": True})
    await wire.drain()


async def send_logs(wire: Wire, logs_dir: Path, request: Json) -> None:
    """Send the lines that `request` asks for, some hundred to a message; with `follow` until the connection is closed.

    Raises: InputError if it asks for what is no folder of logs; WireError once nobody listens.
    """
    tail = request["tail"]
    lines = LocalLogs(logs_dir).logs(
        str(request["folder"]), request.get("replica"), None if tail is None else int(tail), bool(request["follow"])
    )
    async with contextlib.aclosing(lines):
        async for found in lines:
            for start in range(0, max(len(found), 1), _BATCH):
                wire.send({"lines": [asdict(line) for line in found[start : start + _BATCH]]})
                await wire.drain()
            if wire.reader.at_eof() or wire.writer.is_closing():
                return
    wire.send({"end": True})
    await wire.drain()
