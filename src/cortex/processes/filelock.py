"""A lock among all processes and tasks of a machine that share a file."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_POLL_S = 0.1


@asynccontextmanager
async def locked(file: Path) -> AsyncIterator[int]:
    """Hold the lock of `file`, which is made if needed; yields its descriptor.

    A child process that is handed the descriptor keeps the lock if this process dies.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
        yield lock
    finally:
        # Not only closed: a child may still have it open.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
