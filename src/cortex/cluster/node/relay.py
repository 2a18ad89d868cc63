"""Brings what is sent on a node to the operator, wherever that is: to a unix socket there, from one of its own here.

What workers send goes to the target JOBS, what the model agent asks to LISTINGS. Knows nothing of what is sent, but
that what goes to JOBS is HTTP: where the operator can't be reached, that is the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from cortex.cluster.certificate import own_certificate
from cortex.cluster.transport import HANDSHAKE_TIMEOUT_S, MAX_LINE_BYTES, Wire, WireError, accept, connect, keep_alive

#: What a connection is for; its first message says so.
JOBS, LISTINGS = "jobs", "listings"
_CHUNK_BYTES = 256 * 1024
_MESSAGE = "the operator can't be reached; jobs can't be submitted, seen or stopped now"
_AWAY = json.dumps({"kind": "operator_unavailable", "message": _MESSAGE, "error": _MESSAGE}).encode()
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_AWAY), _AWAY)
)
#: What was sent already is read for so long: who is cut off while sending would not see the answer.
_LINGER_S = 5.0


class NodeRelay:
    """On a node: who connects to one of `sockets`, by target, speaks with the operator. `lead` says where that is."""

    def __init__(self, sockets: Mapping[str, Path], key: str) -> None:
        self._sockets = sockets
        self._key = key
        self._operator: tuple[str, int] | None = None
        self._servers: list[asyncio.Server] = []

    def lead(self, host: str, port: int) -> None:
        """Learn where the operator is from now on."""
        self._operator = (host, port)

    async def startup(self) -> None:
        """Listen."""
        for target, path in self._sockets.items():
            path.unlink(missing_ok=True)
            self._servers.append(await asyncio.start_unix_server(partial(self._serve, target), str(path)))
            path.chmod(0o600)

    async def shutdown(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.close()

    async def _serve(self, target: str, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            wire = await self._reach()
            if wire is not None:
                wire.send({"target": target})
                await splice(reader, writer, wire.reader, wire.writer)
            elif target == JOBS:
                await _turn_away(reader, writer)
        finally:
            writer.close()

    async def _reach(self) -> Wire | None:
        if self._operator is None:
            return None
        with contextlib.suppress(WireError):
            return await connect(*self._operator, self._key)
        return None


class OperatorPort:
    """At the operator: what nodes send comes to the unix socket of its target."""

    def __init__(self, sockets: Mapping[str, Path], key: str) -> None:
        self._sockets = sockets
        self._key = key
        self._server: asyncio.Server | None = None

    async def startup(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises: OSError."""
        own_certificate()  # whatever keeps it from being made shows here
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_LINE_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def shutdown(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        wire = await accept(reader, writer, self._key)
        if wire is None:
            return
        try:
            with contextlib.suppress(OSError, TimeoutError, WireError):
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    first = await wire.receive()
                path = self._sockets.get(str(first and first.get("target")))
                if path is None:
                    return
                inner_reader, inner_writer = await asyncio.open_unix_connection(str(path))
                await splice(wire.reader, wire.writer, inner_reader, inner_writer)
        finally:
            writer.close()


async def _turn_away(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await reader.read(1)  # before the request there is nothing to answer
            writer.write(_ANSWER)
            writer.write_eof()
            while await reader.read(_CHUNK_BYTES):
                pass


async def splice(reader: StreamReader, writer: StreamWriter, far: StreamReader, far_writer: StreamWriter) -> None:
    """Pass on what comes, both ways, until both sides have ended; then both are closed."""
    keep_alive(far_writer)
    try:
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far, writer))
    finally:
        writer.close()
        far_writer.close()


async def _pass_on(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()
        else:
            writer.close()  # TLS has no end of one direction; who has sent all and hung up waits for nothing
