"""The requests inside a process, as they came, in memory that outlives it: the next process can read them again.

Only APIs that batch keep theirs: of a batch that kills its process, nobody knows which request is guilty. It is shared
by supervisor and worker, like the cells.
"""

from __future__ import annotations

import mmap

#: A request with more bytes, head and body, is not kept.
MAX_BYTES = 256 * 1024
_WORD = 8
#: Pages that nobody wrote take no memory; the kernel need not be ready to give all of them.
_NO_RESERVE = 0x4000


class KeptRequests:
    """One request per connection index: the last that came."""

    def __init__(self, connections: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = memoryview(mmap.mmap(-1, connections * (_WORD + MAX_BYTES), flags=flags))
        self._lengths = self._memory[: connections * _WORD].cast("q")
        self._requests = self._memory[connections * _WORD :]

    def is_whole(self, index: int) -> bool:
        """Tell whether all that was read of the last request is here."""
        return self._lengths[index] > 0

    def is_empty(self, index: int) -> bool:
        """Tell whether nothing of the last request was read yet."""
        return self._lengths[index] == 0

    def begin(self, index: int) -> None:
        """Forget the last request: the next one is about to be read."""
        self._lengths[index] = 0

    def keep(self, index: int, data: memoryview) -> None:
        """Keep what was read of a request."""
        used = self._lengths[index]
        if used < 0:
            return
        if used + len(data) > MAX_BYTES:
            self._lengths[index] = -1
            return
        self._slot(index, used, len(data))[:] = data
        self._lengths[index] = used + len(data)

    def restore(self, index: int, buffer: memoryview) -> int:
        """Put what is kept into a buffer, which must be large enough, and return its size."""
        size = self._lengths[index]
        buffer[:size] = self._slot(index, 0, size)
        return size

    def _slot(self, index: int, start: int, size: int) -> memoryview:
        base = index * MAX_BYTES + start
        return self._requests[base : base + size]
