"""Read request bodies in the operator with limits on each one and on all together."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from starlette.requests import Request

from cortex.errors import BusyError, TooLargeError

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

    Raises: TooLargeError, with `fix` in its message, as soon as more than `max_bytes` are announced or received.
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
            acquire(len(piece))
            pieces.append(piece)
    if max(size, total) > max_bytes:
        raise TooLargeError(f"the body is larger than {max_bytes} bytes{f'; {fix}' if fix else ''}")
    return b"".join(pieces)
