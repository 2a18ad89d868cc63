"""How operator and nodes speak: lines of JSON over TLS, once both sides have shown that they know the secret.

The secret itself never travels: who connects answers a random challenge. Strangers get no further than that.
Over TLS each side then shows, first of all, that it knows the secret and sees the certificate that the listener has:
nobody is between them, and nobody has put in anything before.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from cortex.cluster.credentials import fingerprint, own_certificate, unverified_context
from cortex.errors import EngineError

Json = dict[str, Any]

#: A line holds the status of one replica, or its spec.
MAX_LINE_BYTES = 16 * 1024 * 1024
HANDSHAKE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
_CHUNK_BYTES = 256 * 1024
_GREETING = "cortex-node 2"
#: Until it is known who speaks, a line is short.
_MAX_GREETING_BYTES = 4096
#: So many who are unknown may be connected; with more, who has been that for longest is hung up on.
MAX_UNKNOWN = 256
_unknown: dict[asyncio.Timeout, None] = {}


class PeerError(EngineError):
    """The other side does not know the secret, is of another version, or broke off."""


class PeerNotListeningError(PeerError):
    """The machine is there and refuses connections: what listened has ended, and may be started again."""


@dataclass(frozen=True)
class PeerConnection:
    """Both directions of a connection."""

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
        return _message(line)

    def send(self, message: Json) -> None:
        """Send a message; nothing happens where the other side is gone."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")

    async def drain(self) -> None:
        """Wait until the other side has read most of what was sent. Raises: PeerError if it is gone."""
        try:
            await self.writer.drain()
        except OSError as error:
            raise PeerError("the connection broke") from error

    async def send_bytes(self, data: AsyncIterator[bytes]) -> None:
        """Send what follows a message that says how much it is. Raises: PeerError."""
        async for chunk in data:
            self.writer.write(chunk)
            await self.drain()

    async def receive_bytes(self, size: int) -> AsyncIterator[bytes]:
        """Return what follows such a message. Raises: PeerError if it breaks off."""
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
        """Close both directions, once what was sent is read."""
        self.writer.close()

    def abort(self) -> None:
        """Close both directions at once. TLS would wait half a minute for the end of what is not read any more."""
        self.writer.transport.abort()


async def connect(host: str, port: int, key: str) -> PeerConnection:
    """Connect to a listener of `accept` with the same key. Raises: PeerError."""
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
    except TimeoutError:
        raise PeerError(f"{where} does not answer") from None
    except ConnectionRefusedError as error:
        raise PeerNotListeningError(f"{where} refuses connections") from error
    except OSError as error:
        raise PeerError(f"{where} does not answer ({error.strerror or error})") from error
    wire = PeerConnection(reader, writer)
    is_known = False
    keep_alive(writer)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            is_known = await _introduce(wire, key)
    except TimeoutError:
        raise PeerError(f"{where} does not answer") from None
    except OSError as error:
        raise PeerError(f"{where} broke off ({error.strerror or error})") from error
    finally:
        if not is_known:
            wire.close()
    if not is_known:
        raise PeerError(f"{where} does not know the secret of this cluster")
    return wire


async def _introduce(wire: PeerConnection, key: str) -> bool:
    """Show that we know the key; tell whether they do. Raises: OSError, PeerError."""
    theirs, ours = await _greeting(wire), secrets.token_hex(16)
    wire.send({"nonce": ours, "proof": _proof(key, "client", theirs)})
    if await wire.receive() is None:
        return False
    await wire.writer.start_tls(unverified_context())
    seen = fingerprint(wire.writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    # What somebody put in before TLS is read here, in the place of what nobody else can say.
    answer = await wire.receive()
    if answer is None or not _is(answer, _proof(key, "server", ours, seen)):
        return False
    wire.send({"proof": _proof(key, "client", theirs, seen)})
    return True


async def accept(reader: StreamReader, writer: StreamWriter, key: str) -> PeerConnection | None:
    """Greet who connected; None, and the connection is closed, unless they know the key."""
    wire = PeerConnection(reader, writer)
    keep_alive(writer)
    patience = asyncio.timeout(HANDSHAKE_TIMEOUT_S)
    is_known = False
    try:
        async with patience:
            _make_room()
            _unknown[patience] = None
            is_known = await _get_to_know(wire, key)
    except (OSError, TimeoutError, PeerError):
        pass
    finally:
        _unknown.pop(patience, None)
        if not is_known:
            wire.close()
    return wire if is_known else None


async def _get_to_know(wire: PeerConnection, key: str) -> bool:
    """Tell whether who connected knows the key; show that we do. Raises: OSError, PeerError."""
    nonce = secrets.token_hex(16)
    wire.send({"hello": _GREETING, "nonce": nonce})
    answer = _message(await _short_line(wire.reader))
    if not _is(answer, _proof(key, "client", nonce)):
        return False
    shown = own_certificate()
    wire.send({"begin": "tls"})
    await wire.writer.start_tls(shown.context)
    wire.send({"proof": _proof(key, "server", _text(answer, "nonce"), shown.fingerprint)})
    answer = _message(await _short_line(wire.reader))
    return _is(answer, _proof(key, "client", nonce, shown.fingerprint))


def _make_room() -> None:
    """End the patience with who has been unknown for longest, where too many are."""
    if len(_unknown) >= MAX_UNKNOWN:
        longest = next(iter(_unknown))
        del _unknown[longest]
        if not longest.expired():
            longest.reschedule(0)  # to abort the connection would not be noticed in the middle of TLS's beginning


def keep_alive(writer: StreamWriter) -> None:
    """Have the kernel notice within seconds that the other machine is gone, and send small messages at once."""
    sock = writer.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 3),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 6000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _greeting(wire: PeerConnection) -> str:
    hello = _message(await _short_line(wire.reader))
    if hello.get("hello") != _GREETING:
        raise PeerError("what answers there is no node of this version of cortex")
    return _text(hello, "nonce")


async def _short_line(reader: StreamReader) -> bytes:
    """Read a line of somebody unknown, who must not fill our memory."""
    line = b""
    while not line.endswith(b"\n"):
        byte = await reader.read(1)  # what follows the line is not ours to read
        if not byte or len(line) > _MAX_GREETING_BYTES:
            raise PeerError("what answers there is no node of this version of cortex")
        line += byte
    return line


def _message(line: bytes) -> Json:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise PeerError("what was sent is no message") from None
    if not isinstance(message, dict):
        raise PeerError("what was sent is no message")
    return message


def _text(message: Json, name: str) -> str:
    value = message.get(name)
    return value if isinstance(value, str) else ""


def _is(answer: Json, proof: str) -> bool:
    return hmac.compare_digest(_text(answer, "proof").encode(errors="replace"), proof.encode())


def _proof(key: str, *what: str) -> str:
    """Answer challenges. Those of strangers are among them: no two answers may be the same that mean something else."""
    return hmac.new(key.encode(), json.dumps(what).encode(), hashlib.sha256).hexdigest()
