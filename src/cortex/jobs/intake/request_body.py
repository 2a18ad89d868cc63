"""Read request bodies in the operator with limits on each one and on all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from starlette.requests import Request

from cortex.errors import BusyError, InputError, TooLargeError, UnsupportedMediaTypeError
from cortex.payloads.content_encoding import BodyDecoder, content_coding
from cortex.payloads.content_type import UTF8, charset_of, is_text, media_type_of, to_utf8
from cortex.payloads.validation import BadBody

#: Memory for the bodies of all submissions that are not stored yet. Uploads of lines need almost none.
MAX_HELD_BYTES = 128 * 1024 * 1024


class RequestMemory:
    """Limit on the memory of all request bodies together; a single body may be larger."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held = 0

    def share(self) -> MemoryShare:
        """Return one request's share, a context manager that releases it at its end."""
        return MemoryShare(self)

    def change(self, size_bytes: int, own: int) -> None:
        """Acquire memory (or release it, if negative) for a request that holds `own`. Raises: BusyError."""
        others = self._held - own
        if size_bytes > 0 and others and self._held + size_bytes > self._max_bytes:
            raise BusyError("too many large submissions arrive at once; try again")
        self._held += size_bytes


class MemoryShare:
    """One request's share of `RequestMemory`."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._bytes = 0

    def acquire(self, size_bytes: int) -> None:
        """Acquire more memory. Raises: BusyError."""
        self._memory.change(size_bytes, self._bytes)
        self._bytes += size_bytes

    def __enter__(self) -> MemoryShare:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._memory.change(-self._bytes, self._bytes)


async def read_body(
    request: Request, max_bytes: int, acquire: Callable[[int], None] = lambda _: None, fix: str = ""
) -> bytes:
    """Return the body of a request. `acquire` gets the size of each piece before it is kept.

    It is decompressed. Raises: TooLargeError, with `fix` in its message, as soon as more than `max_bytes` are announced
    or received; InputError, UnsupportedMediaTypeError.
    """
    length = request.headers.get("content-length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
    pieces: list[bytes] = []
    total = 0
    if size <= max_bytes:
        async for piece in body_pieces(request):
            total += len(piece)
            if total > max_bytes:
                break
            acquire(len(piece))
            pieces.append(piece)
    if max(size, total) > max_bytes:
        raise TooLargeError(f"the body is larger than {max_bytes} bytes{f'; {fix}' if fix else ''}")
    return b"".join(pieces)


async def body_pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, decompressed. Raises: InputError, TooLargeError, UnsupportedMediaTypeError."""
    try:
        coding = content_coding(",".join(request.headers.getlist("content-encoding")).encode("latin-1"))
        decoder = BodyDecoder(coding) if coding else None
        is_empty = True
        async for received in request.stream():
            is_empty = is_empty and not received
            if decoder is None:
                yield received
                continue
            for piece in decoder.feed(received):
                yield piece
                await asyncio.sleep(0)  # a small piece may decompress to a large one
        if decoder is not None and not is_empty:
            decoder.end()
    except BadBody as error:
        raise as_input_error(error) from None


def text_in_utf8(body: bytes, content_type: str) -> bytes:
    """Return a body in UTF-8. Raises: InputError, UnsupportedMediaTypeError."""
    try:
        return to_utf8(body, content_type.encode("latin-1", "replace"))
    except BadBody as error:
        raise as_input_error(error) from None


def check_utf8(content_type: str) -> None:
    """Check that lines of JSON, which are read as they arrive, are UTF-8. Raises: UnsupportedMediaTypeError."""
    try:
        if charset_of(content_type.encode("latin-1", "replace")) != UTF8:
            raise UnsupportedMediaTypeError("lines of JSON can be sent in UTF-8 only")
    except BadBody as error:
        raise as_input_error(error) from None


def check_charset(content_type: str) -> None:
    """Check the character set of a text. Raises: UnsupportedMediaTypeError."""
    raw = content_type.encode("latin-1", "replace")
    try:
        if is_text(media_type := media_type_of(raw)) or media_type.startswith(b"multipart/form"):
            charset_of(raw)
    except BadBody as error:
        raise as_input_error(error) from None


def as_input_error(error: BadBody) -> InputError:
    """Return the error with the status of `error`."""
    if error.status == UnsupportedMediaTypeError.http_status:
        accepted = dict(error.headers).get(b"accept-encoding", b"").decode()
        return UnsupportedMediaTypeError(str(error), accepted)
    return (TooLargeError if error.status == TooLargeError.http_status else InputError)(str(error))
