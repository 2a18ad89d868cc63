"""Advisory file locks (flock) between the processes and tasks of a machine.

The kernel releases the lock of a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO

_POLL_S = 0.05


class LockHeldError(Exception):
    """Another process holds the lock."""


@asynccontextmanager
async def locked(file: Path) -> AsyncIterator[int]:
    """Hold the lock of `file`, which is created if needed. Yields its descriptor.

    A child process that inherits the descriptor keeps the lock if this process dies.
    """
    import asyncio  # noqa: PLC0415 - supervisors and commands import this module and have no event loop

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(lock):
            await asyncio.sleep(_POLL_S)
        yield lock
    finally:
        _unlock(lock)
        os.close(lock)


@contextmanager
def hold_lock(file: Path, timeout_s: float = 0.0) -> Iterator[IO[str]]:
    """Hold the lock of `file`, which is created if needed. Yields the open file, which may name the holder.

    Raises: LockHeldError if another process still holds the lock after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "a+") as stream:
        while not _try_lock(stream.fileno()):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise LockHeldError(f"another process holds the lock {file}")
            time.sleep(min(_POLL_S, remaining_s))
        try:
            yield stream
        finally:
            _unlock(stream.fileno())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    # Closing the file is not enough: a forked child may still have it open.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
