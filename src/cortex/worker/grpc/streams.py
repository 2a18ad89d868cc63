"""The messages of a client that streams its request: an iterator for user code on a thread, and one for coroutines.

The event loop adds messages. It stops reading the connection while more than `MAX_UNREAD_BYTES` wait for user code.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

MAX_UNREAD_BYTES = 256 * 1024
#: Each message counts as this much more, so that empty ones are bounded, too.
_OVERHEAD_BYTES = 64
_END = object()


class ThreadRequests:
    """A blocking iterator."""

    def __init__(
        self,
        parse: Callable[[bytes], Any],
        on_room: Callable[[], None],
        on_wait: Callable[[bool], None] = lambda waits: None,
    ) -> None:
        """Create it.

        On the thread of user code, `on_room` is called when messages may be added again, and `on_wait` before and after
        a wait for a message.
        """
        self._parse = parse
        self._on_room = on_room
        self._on_wait = on_wait
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self._unread = 0
        self._was_full = False

    def is_full(self) -> bool:
        """Return whether no message may be added now."""
        with self._lock:
            self._was_full = self._unread > MAX_UNREAD_BYTES
            return self._was_full

    def add(self, message: bytes) -> None:
        """Add a message."""
        with self._lock:
            self._unread += len(message) + _OVERHEAD_BYTES
        self._queue.put(message)

    def end(self, error: Exception | None = None) -> None:
        """End the iteration after the messages that were added, or with an error."""
        self._queue.put(_END if error is None else error)

    def __iter__(self) -> ThreadRequests:
        return self

    def __next__(self) -> Any:
        try:
            item = self._queue.get_nowait()
        except Empty:
            self._on_wait(True)
            item = self._queue.get()
            self._on_wait(False)
        if not isinstance(item, bytes):
            self._queue.put(item)
            raise StopIteration if item is _END else item
        with self._lock:
            self._unread -= len(item) + _OVERHEAD_BYTES
            has_room = self._was_full and self._unread <= MAX_UNREAD_BYTES // 2
            self._was_full = self._was_full and not has_room
        if has_room:
            self._on_room()
        return self._parse(item)


class AsyncRequests:
    """An asynchronous iterator. Event-loop thread only."""

    def __init__(self, parse: Callable[[bytes], Any], on_room: Callable[[], None]) -> None:
        """Create it; `on_room` is called when messages may be added again."""
        self._parse = parse
        self._on_room = on_room
        self._messages: deque[bytes] = deque()
        self._unread = 0
        self._is_over = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def is_full(self) -> bool:
        """Return whether no message may be added now."""
        return self._unread > MAX_UNREAD_BYTES

    def add(self, message: bytes) -> None:
        """Add a message."""
        self._unread += len(message) + _OVERHEAD_BYTES
        self._messages.append(message)
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """End the iteration after the messages that were added, or with an error."""
        self._is_over, self._error = True, self._error or error
        self._changed.set()

    def __aiter__(self) -> AsyncRequests:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._is_over:
                raise self._error or StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        was_full = self.is_full()
        self._unread -= len(message) + _OVERHEAD_BYTES
        if was_full and not self.is_full():
            self._on_room()
        return self._parse(message)
