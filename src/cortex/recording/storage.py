"""Storage of recordings: files in a folder, or objects in a bucket, which together stay within `max_bytes`.

The oldest files make room for new ones. Processes share a folder and know nothing of each other: each deletes the
oldest files, and begins another one when its own was deleted. So the files may exceed the limit by what all processes
write within `TRIM_S`, which is why `files_to_delete` gets the limit without the size of one file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from cortex.recording.files import SUFFIX

#: Interval in which the oldest files are deleted while exchanges are written.
TRIM_S = 1.0
#: Number of files that share the limit, unless they would be larger than `MAX_FILE_BYTES`.
_FILES = 16
MAX_FILE_BYTES = 64 * 1024 * 1024
#: An object is written once it has this size or age.
OBJECT_BYTES = 4 * 1024 * 1024
OBJECT_AGE_S = 30.0


class RecordingStorage(Protocol):
    """A place for lines. For one thread."""

    def write(self, lines: bytes) -> None:
        """Write complete lines. Raises: OSError, StorageError."""

    def flush(self, now_s: float) -> None:
        """Write what is due at `now_s` (monotonic). Raises: OSError, StorageError."""

    def close(self) -> None:
        """Write what is left. Raises: OSError, StorageError."""

    def due_s(self, now_s: float) -> float | None:
        """Return the seconds until `flush` has something to do; None: nothing."""


def file_bytes(max_bytes: int) -> int:
    """Return the size at which a process begins another file."""
    return min(max_bytes // _FILES, MAX_FILE_BYTES)


def files_to_delete(sizes: Sequence[tuple[str, int]], max_bytes: int, own: str | None = None) -> list[str]:
    """Return the oldest files whose deletion leaves at most `max_bytes`; never `own`. Names sort by their age."""
    total = sum(size for _, size in sizes)
    deleted = []
    for name, size in sorted(sizes):
        if total <= max_bytes:
            break
        if name != own:
            deleted.append(name)
            total -= size
    return deleted


def file_name(started: datetime, writer: str) -> str:
    """Return the name of a file; `writer` is unique to a process."""
    return f"{started.astimezone(UTC):%Y%m%dT%H%M%S.%fZ}-{writer}{SUFFIX}"


class FolderStorage:
    """Files in a folder, in order of time by their names."""

    def __init__(self, folder: Path, writer: str, head: Callable[[datetime], bytes], max_bytes: int) -> None:
        """Create the storage; `head` returns the first line of a file that begins at that time."""
        self._folder = folder
        self._writer = writer
        self._head = head
        self._max_bytes = max_bytes
        self._descriptor = -1
        self._name = ""
        self._size = 0
        self._trimmed_at = -TRIM_S

    def write(self, lines: bytes) -> None:
        """Write complete lines; if they do not fit onto the disk, none of them is written. Raises: OSError."""
        if self._descriptor >= 0 and self._size + len(lines) > file_bytes(self._max_bytes):
            self.close()
        if time.monotonic() - self._trimmed_at >= TRIM_S:
            self._trim()
        if self._descriptor < 0:
            if not self._folder.is_dir():  # only the last folder: what is around it may be a disk that is not mounted
                self._folder.parent.mkdir(mode=0o700, exist_ok=True)
                self._folder.mkdir(mode=0o700, exist_ok=True)
            started = datetime.now(UTC)
            self._name, self._size = file_name(started, self._writer), 0
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self._folder / self._name, flags, 0o600)
            self._append(self._head(started))
        self._append(lines)

    def flush(self, now_s: float) -> None:
        """Do nothing: lines are written at once."""

    def due_s(self, now_s: float) -> float | None:
        """Return None: lines are written at once."""
        return None

    def close(self) -> None:
        """End the present file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _append(self, lines: bytes) -> None:
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # remove the part that fitted
                os.ftruncate(self._descriptor, self._size)
            self.close()
            raise
        self._size += len(lines)

    def _trim(self) -> None:
        self._trimmed_at = time.monotonic()
        sizes: list[tuple[str, int]] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                        sizes.append((entry.name, entry.stat().st_size))
        for name in files_to_delete(sizes, self._max_bytes - file_bytes(self._max_bytes), self._name):
            (self._folder / name).unlink(missing_ok=True)
        if self._descriptor >= 0 and not os.fstat(self._descriptor).st_nlink:
            self.close()


class BucketClient(Protocol):
    """The operations of an object store that `BucketStorage` uses. Raises: StorageError."""

    def put(self, name: str, content: bytes) -> None:
        """Create an object."""

    def sizes(self) -> list[tuple[str, int]]:
        """List all objects by name and size in bytes."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""


class BucketStorage:
    """Objects in a bucket; lines wait in memory until an object is due."""

    def __init__(self, client: BucketClient, writer: str, head: Callable[[datetime], bytes], max_bytes: int) -> None:
        self._client = client
        self._writer = writer
        self._head = head
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._size = 0
        self._started = datetime.now(UTC)
        self._started_s = 0.0

    def write(self, lines: bytes) -> None:
        """Keep complete lines; before that, write an object if there are enough. Raises: StorageError."""
        if self._size >= min(OBJECT_BYTES, file_bytes(self._max_bytes)):
            self._put()
        if not self._lines:
            self._started, self._started_s = datetime.now(UTC), time.monotonic()
        self._lines.append(lines)
        self._size += len(lines)

    def flush(self, now_s: float) -> None:
        """Write an object if it is due. Raises: StorageError."""
        if self._lines and now_s - self._started_s >= OBJECT_AGE_S:
            self._put()

    def due_s(self, now_s: float) -> float | None:
        """Return the seconds until an object is due; None: there are no lines."""
        return max(0.0, self._started_s + OBJECT_AGE_S - now_s) if self._lines else None

    def close(self) -> None:
        """Write the lines that are left. Raises: StorageError."""
        if self._lines:
            self._put()

    def _put(self) -> None:
        content = b"".join([self._head(self._started), *self._lines])
        self._started_s = time.monotonic()  # of the next attempt, if this one fails
        sizes = self._client.sizes()
        if old := files_to_delete(sizes, self._max_bytes - len(content)):
            self._client.delete(old)
        self._client.put(file_name(self._started, self._writer), content)
        self._lines, self._size = [], 0
