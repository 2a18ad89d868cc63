"""Content codings of request bodies (RFC 9110, 8.4): gzip and deflate, within limits.

All routes decode bodies but those of applications and commands, which receive the bytes and the header as they are.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Final

from cortex.payloads.validation import BadBody

HEADER: Final = b"content-encoding"
#: Codings that are decoded, as the header `Accept-Encoding` of a refusal names them.
ACCEPTED: Final = b"gzip, deflate"
#: Bodies that grow to more than this by decompression, and to more than so many times their compressed size, are
#: refused: kilobytes could become millions of objects.
MAX_GROWN_BYTES: Final = 8 * 1024**2
MAX_GROWTH: Final = 100

_INPUT_BYTES = 64 * 1024
_OUTPUT_BYTES = 256 * 1024
#: Members of gzip in one body, each of which costs a copy of the input that follows it.
_MAX_MEMBERS = 10_000
_SHOWN_CHARACTERS = 40


def content_coding(header: bytes) -> str:
    """Return the coding that the values of `Content-Encoding`, joined by commas, name; "" for none.

    Raises: BadBody with the status 415 for any other, and for several.
    """
    found = [name for each in header.split(b",") if (name := each.strip().lower()) not in (b"", b"identity")]
    if not found:
        return ""
    if len(found) > 1 or found[0] not in (b"gzip", b"x-gzip", b"deflate"):
        shown = b", ".join(found).decode("latin-1")[:_SHOWN_CHARACTERS]
        message = f"the content encoding {shown!r} is not supported; use gzip, deflate or none"
        raise BadBody(message, 415, ((b"accept-encoding", ACCEPTED),))
    return found[0].decode()


def decode_body(body: bytes, coding: str, max_bytes: int, json_length: int | None = None) -> bytes:
    """Return a whole body decoded. Of one with binary tensors, only the JSON (`json_length`) must not grow too much.

    Raises: BadBody.
    """
    decoder = BodyDecoder(coding, max_bytes, may_grow=json_length is not None)
    decoded = io.BytesIO()
    for piece in decoder.feed(body):
        decoded.write(piece)
    decoder.end()
    if json_length is not None:
        _check_growth(min(json_length, decoded.tell()), len(body))
    return decoded.getvalue()


class BodyDecoder:
    """Decodes a body piece by piece. The methods raise BadBody."""

    def __init__(self, coding: str, max_bytes: int | None = None, may_grow: bool = False) -> None:
        """Decode up to `max_bytes`, if given, and with `may_grow` without a limit of the ratio."""
        self._coding = coding
        self._max_bytes = max_bytes
        self._may_grow = may_grow
        self._members = 0
        self._fed = 0
        self._decoded = 0
        self._inflater: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next piece of the body decodes to, in pieces."""
        view = memoryview(data)
        for start in range(0, len(view), _INPUT_BYTES):
            yield from self._decode(bytes(view[start : start + _INPUT_BYTES]))

    def end(self) -> None:
        """Check that the body is complete."""
        if self._inflater is None or not self._inflater.eof:
            raise self._invalid("it is incomplete")

    def _decode(self, data: bytes) -> Iterator[bytes]:
        self._fed += len(data)
        is_full = False  # there may be output without further input
        while data or is_full:
            if self._inflater is None or self._inflater.eof:
                self._inflater = self._next_member(data)
            try:
                piece = self._inflater.decompress(data, _OUTPUT_BYTES)
            except zlib.error as error:
                raise self._invalid(str(error)) from None
            self._decoded += len(piece)
            if self._max_bytes is not None and self._decoded > self._max_bytes:
                raise BadBody(f"the decompressed body is larger than {self._max_bytes} bytes", 413)
            if not self._may_grow:
                _check_growth(self._decoded, self._fed)
            if piece:
                yield piece
            is_full = len(piece) == _OUTPUT_BYTES and not self._inflater.eof
            data = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail

    def _next_member(self, data: bytes) -> zlib._Decompress:
        if self._members and (self._coding == "deflate" or data[:1] != b"\x1f"):  # only gzip has several
            raise self._invalid("bytes follow its end")
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise self._invalid(f"it has more than {_MAX_MEMBERS} members")
        # Some clients send `deflate` without the header of zlib, whose first byte has the compression method 8.
        is_bare = self._coding == "deflate" and data[0] & 0x0F != zlib.DEFLATED
        return zlib.decompressobj(-zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32)

    def _invalid(self, reason: str) -> BadBody:
        return BadBody(f"the body is not valid {self._coding}: {reason}")


def _check_growth(decoded_bytes: int, encoded_bytes: int) -> None:
    if decoded_bytes > max(MAX_GROWN_BYTES, MAX_GROWTH * encoded_bytes):
        message = f"the decompressed body is larger than {MAX_GROWTH} times the compressed one"
        raise BadBody(f"{message}; send it uncompressed, or tensors in binary form", 413)
