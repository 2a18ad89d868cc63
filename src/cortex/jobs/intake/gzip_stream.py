"""Decompress gzip while it arrives, in bounded memory; other data passes unchanged."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from cortex.errors import SubmissionError

_MAGIC = b"\x1f\x8b"
#: Maximum size of a decompressed piece: a few compressed bytes may expand to very many.
_PIECE_BYTES = 1024 * 1024
_GZIP = 16 + zlib.MAX_WBITS


def is_gzip(data: bytes) -> bool:
    """Return True if a file that begins with `data` is gzip."""
    return data.startswith(_MAGIC)


class GzipStream:
    """Decompresses one file piece by piece if it begins like gzip. `name` is for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._head = b""
        self._is_plain: bool | None = None  #: None: too few bytes to decide
        self._member = zlib.decompressobj(_GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed data of the next piece. Raises: SubmissionError if it is damaged."""
        if self._is_plain is None:
            data = self._head + data
            if len(data) < len(_MAGIC) and _MAGIC.startswith(data):
                self._head = data
                return
            self._head, self._is_plain = b"", not is_gzip(data)
        if self._is_plain:
            yield data
        else:
            yield from self._unpack(data)

    def end(self) -> Iterator[bytes]:
        """Yield the remaining data. Raises: SubmissionError if the file is truncated."""
        if self._head:
            yield self._head
        if self._is_plain is False and not self._member.eof:
            raise SubmissionError(f"{self._name}: its gzip is cut off; store it again")

    def _unpack(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member.eof:  # a file may have several members, and zeros at its end
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._member = zlib.decompressobj(_GZIP)
            try:
                piece = self._member.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                raise SubmissionError(f"{self._name}: its gzip is damaged ({error}); store it again") from None
            if piece:
                yield piece
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
