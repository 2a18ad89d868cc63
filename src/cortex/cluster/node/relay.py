"""Relay of job workers' connections: from a unix socket on a node to the operator's unix socket for jobs.

The relay copies bytes; it only assumes that they are HTTP, to answer 503 while the operator can't be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio import StreamReader, StreamWriter
from pathlib import Path

from cortex.cluster.credentials import TlsIdentity
from cortex.cluster.transport import (
    HANDSHAKE_TIMEOUT_S,
    PeerConnection,
    PeerError,
    connect,
    keep_alive,
    listen,
)

#: The first message of a connection names its target. Nodes of earlier versions connect to others, too.
JOBS = "jobs"
_CHUNK_BYTES = 256 * 1024
_MESSAGE = "the operator can't be reached; jobs and documentation are not available now"
_AWAY = json.dumps({"kind": "operator_unavailable", "message": _MESSAGE, "error": _MESSAGE}).encode()
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_AWAY), _AWAY)
)
#: How long to read the rest of a request after a 503: a client whose upload is reset does not read the response.
_LINGER_S = 5.0


class NodeRelay:
    """The node's end: a unix socket. `lead` sets the address of the operator."""

    def __init__(self, socket: Path, identity: TlsIdentity) -> None:
        self._socket = socket
        self._identity = identity
        self._operator: tuple[str, int] | None = None
        self._server: asyncio.Server | None = None

    def lead(self, host: str, port: int) -> None:
        """Set the address of the operator."""
        self._operator = (host, port)

    async def startup(self) -> None:
        """Start to listen."""
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._socket))
        self._socket.chmod(0o600)

    async def shutdown(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            # The gateway's health checks connect and send nothing; a response must not precede its request either.
            begin = b""
            with contextlib.suppress(OSError):
                begin = await reader.read(_CHUNK_BYTES)
            if not begin:
                return
            connection = await self._connect()
            if connection is not None:
                connection.send({"target": JOBS})
                connection.writer.write(begin)
                await splice(reader, writer, connection.reader, connection.writer)
            else:
                await _answer_unavailable(reader, writer)
        finally:
            writer.close()

    async def _connect(self) -> PeerConnection | None:
        if self._operator is None:
            return None
        with contextlib.suppress(PeerError):
            return await connect(*self._operator, self._identity)
        return None


class OperatorPort:
    """The operator's end: a TCP port whose connections go to a unix socket."""

    def __init__(self, socket: Path, identity: TlsIdentity) -> None:
        self._socket = socket
        self._identity = identity
        self._server: asyncio.Server | None = None

    async def startup(self, host: str, port: int) -> int:
        """Start to listen; return the port. Raises: OSError."""
        self._server = await listen(self._serve, host, port, self._identity)
        return int(self._server.sockets[0].getsockname()[1])

    async def shutdown(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, connection: PeerConnection) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError, PeerError):
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    first = await connection.receive()
                if first is None or first.get("target") != JOBS:
                    return
                inner_reader, inner_writer = await asyncio.open_unix_connection(str(self._socket))
                await splice(connection.reader, connection.writer, inner_reader, inner_writer)
        finally:
            connection.close()


async def _answer_unavailable(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            writer.write(_ANSWER)
            writer.write_eof()
            while await reader.read(_CHUNK_BYTES):
                pass


async def splice(reader: StreamReader, writer: StreamWriter, far: StreamReader, far_writer: StreamWriter) -> None:
    """Copy bytes both ways until both sides have ended, then close both."""
    keep_alive(far_writer)
    try:
        await asyncio.gather(_copy(reader, far_writer), _copy(far, writer))
    finally:
        writer.close()
        far_writer.close()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()
        else:
            writer.close()  # TLS can't close one direction; a side that ended its requests expects no response
