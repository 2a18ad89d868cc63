"""Connections between the operator and node agents: JSON lines over mutual TLS 1.3.

`credentials.py` has the certificates. After the TLS handshake the listener sends a greeting with the protocol's version
and expects requests; the greeting also tells the client that the listener has accepted its certificate.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from cortex.cluster.credentials import TlsIdentity
from cortex.cluster.node.start import PROTOCOL
from cortex.errors import EngineError
from cortex.payloads.json_object import Json

#: A line holds the spec or the status of one replica.
MAX_LINE_BYTES = 16 * 1024 * 1024
HANDSHAKE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
_CHUNK_BYTES = 256 * 1024
_GREETING = f"cortex-node {PROTOCOL}"


class PeerError(EngineError):
    """The peer can't be reached, is not authenticated, has another version, or closed the connection."""


class PeerNotListeningError(PeerError):
    """The machine refuses connections: it is up, and the process that listened has ended."""


@dataclass(frozen=True)
class PeerConnection:
    """An authenticated connection."""

    reader: StreamReader
    writer: StreamWriter

    async def receive(self) -> Json | None:
        """Return the next message; None at the end. Raises: PeerError."""
        try:
            line = await self.reader.readline()
        except ValueError as error:
            raise PeerError("a message is too long") from error
        except OSError:
            return None
        if not line.endswith(b"\n"):
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise PeerError("a message is not valid JSON") from None
        if not isinstance(message, dict):
            raise PeerError("a message is not a JSON object")
        return message

    def send(self, message: Json) -> None:
        """Send a message. Does nothing if the connection is closed."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")

    async def drain(self) -> None:
        """Wait until the peer has read most of what was sent. Raises: PeerError if the connection broke."""
        try:
            await self.writer.drain()
        except OSError as error:
            raise PeerError("the connection broke") from error

    async def send_bytes(self, data: AsyncIterator[bytes]) -> None:
        """Send raw bytes after a message with their number. Raises: PeerError."""
        async for chunk in data:
            self.writer.write(chunk)
            await self.drain()

    async def receive_bytes(self, size: int) -> AsyncIterator[bytes]:
        """Yield the raw bytes that follow a message with their number. Raises: PeerError if the connection breaks."""
        while size > 0:
            try:
                chunk = await self.reader.read(min(size, _CHUNK_BYTES))
            except OSError as error:
                raise PeerError("the connection broke") from error
            if not chunk:
                raise PeerError("the connection broke")
            size -= len(chunk)
            yield chunk

    def close(self) -> None:
        """Close both directions once everything is sent."""
        self.writer.close()

    def abort(self) -> None:
        """Close both directions at once. `close` waits up to 30 s for the peer to read what was sent."""
        self.writer.transport.abort()


async def connect(host: str, port: int, identity: TlsIdentity) -> PeerConnection:
    """Connect to a listener of the peers' authority at this host. Raises: PeerError."""
    where = f"{host}:{port}"
    sock = await _connect_tcp(host, port)
    connection, greeting = None, None
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            # TLS from the first byte: nothing that arrives before the handshake gets into the reader.
            context = identity.client_context()
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=context, server_hostname=host, limit=MAX_LINE_BYTES
            )
            connection = PeerConnection(reader, writer)
            greeting = await connection.receive()
    except TimeoutError:
        raise PeerError(f"{where} does not answer") from None
    except ssl.SSLCertVerificationError as error:
        raise PeerError(f"{where} has no valid certificate of this cluster: {error.verify_message}") from error
    except OSError as error:
        raise PeerError(f"{where} broke off the TLS handshake ({error.strerror or error})") from error
    except ValueError as error:
        raise PeerError(f"{host!r} is not a valid address") from error
    finally:
        if connection is not None and greeting != {"hello": _GREETING}:
            connection.abort()
    if greeting is None:
        raise PeerError(f"{where} does not accept our certificate")
    if greeting != {"hello": _GREETING}:
        raise PeerError(f"{where} runs another version of cortex")
    return connection


async def _connect_tcp(host: str, port: int) -> socket.socket:
    loop, where = asyncio.get_running_loop(), f"{host}:{port}"
    sock = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            family, kind, proto, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            sock = socket.socket(family, kind, proto)
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
        _keep_alive(sock)
        return sock
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, TimeoutError):
            raise PeerError(f"{where} does not answer") from None
        if isinstance(error, ConnectionRefusedError):
            raise PeerNotListeningError(f"{where} refuses connections") from error
        if isinstance(error, OSError):
            raise PeerError(f"{where} does not answer ({error.strerror or error})") from error
        if isinstance(error, ValueError):
            raise PeerError(f"{host!r} is not a valid address") from error
        raise


async def listen(
    serve: Callable[[PeerConnection], Awaitable[None]], host: str, port: int, identity: TlsIdentity
) -> asyncio.Server:
    """Accept connections of the peers' authority; `serve` closes them. Raises: OSError."""

    async def greet(reader: StreamReader, writer: StreamWriter) -> None:
        keep_alive(writer)
        connection = PeerConnection(reader, writer)
        connection.send({"hello": _GREETING})
        await serve(connection)

    context = identity.server_context()
    return await asyncio.start_server(
        greet, host, port, limit=MAX_LINE_BYTES, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
    )


def keep_alive(writer: StreamWriter) -> None:
    """Detect a dead peer within seconds, and send small messages at once."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        _keep_alive(sock)


def _keep_alive(sock: socket.socket) -> None:
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 3),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 6000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
