"""The wire format of gRPC over HTTP: framed messages, metadata, deadlines and statuses.

The protocol is https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. Between the gateway and a worker it is
spoken over HTTP/1.1: the gateway converts headers, streamed bodies and trailers from and to HTTP/2. So a worker serves
gRPC on the connections that every worker has, and needs no server of its own that would accept them.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import zlib
from collections.abc import Iterable, Iterator

import grpc

from cortex.worker.http.responses import Header, ValidHeaders, validate_head

Metadata = tuple[tuple[str, str | bytes], ...]

#: Compressions of the messages of clients; responses are not compressed.
ENCODINGS = b"identity,deflate,gzip"

_PREFIX = struct.Struct(">BI")
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_NS = {b"H": 3_600_000_000_000, b"M": 60_000_000_000, b"S": 1_000_000_000, b"m": 1_000_000, b"u": 1_000, b"n": 1}
#: The header with all services of the gateway, separated by spaces, which the gateway sets for reflection.
SERVICES_HEADER = b"x-cortex-services"
#: Headers that are not metadata.
_RESERVED = frozenset({b"connection", b"content-length", b"content-type", b"host", b"te", b"transfer-encoding"})
_BINARY = "-bin"

#: The HTTP status of each gRPC status, for metrics and for responses in JSON.
#: https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
HTTP_STATUSES = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DATA_LOSS: 500,
}


class RpcError(Exception):
    """A call ends with this status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class MessageReader:
    """Splits the body of a request into messages."""

    def __init__(self, encoding: bytes, max_bytes: int) -> None:
        """Create a reader of messages of up to `max_bytes` each, compressed with the header `grpc-encoding`."""
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete now. Raises: RpcError."""
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            is_compressed, length = _PREFIX.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise _too_large(self._max_bytes)
            end = _PREFIX.size + length
            if len(self._buffer) < end:
                return
            message = bytes(memoryview(self._buffer)[_PREFIX.size : end])
            del self._buffer[:end]
            yield self._decompress(message) if is_compressed else message

    @property
    def is_empty(self) -> bool:
        """Return whether no message is incomplete."""
        return not self._buffer

    def _decompress(self, data: bytes) -> bytes:
        wbits = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}.get(self._encoding)
        if wbits is None:
            refusal = f"messages can't be compressed with {self._encoding.decode('latin-1') or 'nothing'}"
            raise RpcError(grpc.StatusCode.UNIMPLEMENTED, f"{refusal}, only with {ENCODINGS.decode()}")
        decompressor = zlib.decompressobj(wbits)
        try:
            message = decompressor.decompress(data, self._max_bytes + 1)
        except zlib.error as error:
            raise RpcError(grpc.StatusCode.INTERNAL, f"a message can't be decompressed: {error}") from error
        if len(message) > self._max_bytes:
            raise _too_large(self._max_bytes)
        if not decompressor.eof:  # what is missing could be fields of the message
            raise RpcError(grpc.StatusCode.INTERNAL, "a message can't be decompressed: its end is missing")
        return message


def _too_large(max_bytes: int) -> RpcError:
    return RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the message is larger than {max_bytes} bytes")


def frame(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return _PREFIX.pack(0, len(message)) + message


def timeout_ns(value: bytes) -> int | None:
    """Return the time of the header `grpc-timeout`; None if it is absent or malformed."""
    found = _TIMEOUT.fullmatch(value)
    return int(found[1]) * _UNITS_NS[found[2]] if found else None


def metadata_of(headers: Iterable[Header]) -> Metadata:
    """Return the metadata of a call, without what belongs to gRPC, to HTTP or to the gateway."""
    return tuple(
        _decoded(name.decode("latin-1"), value)
        for name, value in headers
        if name not in _RESERVED and (not name.startswith((b"grpc-", b"x-cortex-")) or name == SERVICES_HEADER)
    )


def _decoded(name: str, value: bytes) -> tuple[str, str | bytes]:
    if not name.endswith(_BINARY):
        return name, value.decode("latin-1")
    try:
        return name, base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error:
        return name, b""


def headers_of(metadata: Iterable[tuple[str, str | bytes]]) -> ValidHeaders:
    """Return metadata as headers. Raises: ValueError for a key or value that is not allowed in them; UserError."""
    return validate_head(200, (_encoded(key, value) for key, value in metadata))


def _encoded(key: str, value: str | bytes) -> Header:
    if not re.fullmatch(r"[0-9a-z_.-]+", key):
        raise ValueError(f"the metadata key {key!r} must be of lower case letters, digits, dots, dashes, underscores")
    if key.endswith(_BINARY):
        data = value if isinstance(value, bytes) else value.encode()
        return key.encode(), base64.b64encode(data).rstrip(b"=")
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    if not re.fullmatch(r"[ -~]*", text):
        raise ValueError(f"the value of the metadata key {key!r} must be of ASCII characters; let the key end in -bin")
    return key.encode(), text.encode()
