"""Unpacks gzip as it arrives, in bounded memory; bytes that are no gzip pass as they are."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from cortex.errors import SubmissionError

_MAGIC = b"\x1f\x8b"
#: What is unpacked at once: a few bytes may stand for very many.
_PIECE_BYTES = 1024 * 1024
_GZIP = 16 + zlib.MAX_WBITS


def is_packed(data: bytes) -> bool:
    """Tell whether a file that begins so is gzip."""
    return data.startswith(_MAGIC)


class GzipStream:
    """Takes one file's bytes, piece by piece; a file is gzip if it begins like one. `name` is for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._head = b""
        self._is_plain: bool | None = None  #: None: too few bytes to tell
        self._member = zlib.decompressobj(_GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what is in the next bytes. Raises: SubmissionError if they are damaged."""
        if self._is_plain is None:
            data = self._head + data
            if len(data) < len(_MAGIC) and _MAGIC.startswith(data):
                self._head = data
                return
            self._head, self._is_plain = b"", not is_packed(data)
        if self._is_plain:
            yield data
        else:
            yield from self._unpack(data)

    def end(self) -> Iterator[bytes]:
        """Yield what is left. Raises: SubmissionError if the file is cut off."""
        if self._head:
            yield self._head
        if self._is_plain is False and not self._member.eof:
            raise SubmissionError(f"{self._name}: its gzip is cut off; store it again")

    def _unpack(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member.eof:  # several archives may stand one after another, and zeros at the end
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
