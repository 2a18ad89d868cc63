"""Request bodies, bounded while they come in: the only place that reads them in the operator."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from starlette.requests import Request

from cortex.errors import BusyError, TooLargeError

#: What all submissions together may hold in memory before they are stored. Uploads of lines hold next to nothing.
MAX_HELD_BYTES = 128 * 1024 * 1024


class RequestMemory:
    """What may be held of bodies at a time, over all requests; one that is alone may be larger."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held = 0

    def share(self) -> MemoryShare:
        """Return one request's part of it, a context manager that gives all back at its end."""
        return MemoryShare(self)

    def change(self, size_bytes: int, own: int) -> None:
        """Hold so much more, or less, for one that has `own` already. Raises: BusyError."""
        others = self._held - own
        if size_bytes > 0 and others and self._held + size_bytes > self._max_bytes:
            raise BusyError("too many large submissions are coming in at once; try again")
        self._held += size_bytes


class MemoryShare:
    """One request's part of `RequestMemory`."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._bytes = 0

    def take(self, size_bytes: int) -> None:
        """Hold so much more. Raises: BusyError."""
        self._memory.change(size_bytes, self._bytes)
        self._bytes += size_bytes

    def __enter__(self) -> MemoryShare:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._memory.change(-self._bytes, self._bytes)


async def read_body(
    request: Request, max_bytes: int, take: Callable[[int], None] = lambda _: None, fix: str = ""
) -> bytes:
    """Read a body; `take` is told the size of each piece, before it is kept. `fix` is what to do about a larger one.

    Raises: TooLargeError as soon as it is known to be larger than `max_bytes`.
    """
    length = request.headers.get("content-length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
    pieces: list[bytes] = []
    total = 0
    if size <= max_bytes:
        async for piece in request.stream():
            total += len(piece)
            if total > max_bytes:
                break
            take(len(piece))
            pieces.append(piece)
    if max(size, total) > max_bytes:
        raise TooLargeError(f"the body is larger than {max_bytes} bytes{f'; {fix}' if fix else ''}")
    return b"".join(pieces)
