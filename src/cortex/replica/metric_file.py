"""Numbers that one process writes and others read, in a file mapped into memory: they outlive the process.

A file is a sequence of entries: the length of the key (a word of 8 bytes), the key, filled up to whole words, and the
value, a double. The first word says how many bytes are used. A number is changed by a plain store, so it is right
whatever its writer is killed in. It knows nothing of what is counted: keys are text, one per series.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from pathlib import Path

#: Pages cost memory only once they are written.
FILE_BYTES = 4 * 1024 * 1024
#: So much is taken at once. A page that the file system can't give any more when it is written ends the process.
RESERVED_BYTES = 64 * 1024
_WORD = 8


class MetricFile:
    """The numbers of one process; `cells[index_of(key)]` is a value. One thread at a time may change one cell.

    Raises: OSError if the file can't be made, or there is no space for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserved = 0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, FILE_BYTES)
            self._memory = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        self._reserve(_WORD)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")
        self.cells = self._bytes.cast("d")
        self._lock = threading.Lock()
        self._used = max(self._words[0], _WORD)
        self._reserve(self._used)
        self._indexes = {key: offset // _WORD for key, offset, _ in _entries(bytes(self._bytes[: self._used]))}

    @property
    def left_bytes(self) -> int:
        """Tell how much can be added; an entry takes the bytes of its key, and up to three words."""
        return FILE_BYTES - self._used

    def index_of(self, key: str, initial: float = 0.0) -> int | None:
        """Return the index of a series, made with `initial` where it is new; None once there is no space."""
        index = self._indexes.get(key)
        if index is not None:
            return index
        with self._lock:
            return self._indexes.get(key) or self._add(key, initial)

    def _add(self, key: str, initial: float) -> int | None:
        data = key.encode()
        size = -(-len(data) // _WORD) * _WORD
        start = self._used
        end = start + size + 2 * _WORD
        if end > FILE_BYTES:
            return None
        try:
            self._reserve(end)
        except OSError:
            return None
        self._words[start // _WORD] = len(data)
        self._bytes[start + _WORD : start + _WORD + len(data)] = data
        index = (start + _WORD + size) // _WORD
        self.cells[index] = initial
        self._used = (index + 1) * _WORD
        self._words[0] = self._used  # last: readers see whole entries only
        self._indexes[key] = index
        return index

    def _reserve(self, end: int) -> None:
        """Make sure that the file has its bytes up to `end`. Raises: OSError."""
        if end > self._reserved:
            wanted = min(-(-end // RESERVED_BYTES) * RESERVED_BYTES, FILE_BYTES)
            descriptor = os.open(self._path, os.O_RDWR)
            try:
                os.posix_fallocate(descriptor, 0, wanted)
            finally:
                os.close(descriptor)
            self._reserved = wanted


def read_metrics(path: Path) -> dict[str, float]:
    """Return what a file holds, by key; nothing if it is gone, or no such file."""
    with contextlib.suppress(OSError, ValueError, struct.error), path.open("rb") as file:
        (used,) = struct.unpack("=Q", file.read(_WORD) or bytes(_WORD))
        file.seek(0)
        data = file.read(min(used, FILE_BYTES))
        return {key: value for key, _, value in _entries(data)}
    return {}


def _entries(data: bytes) -> list[tuple[str, int, float]]:
    """Return key, offset of the value, value. Raises: ValueError if it is not one of our files."""
    found, offset = [], _WORD
    while offset < len(data):
        (length,) = struct.unpack_from("=Q", data, offset)
        at = offset + _WORD + -(-length // _WORD) * _WORD
        if at + _WORD > len(data):
            raise ValueError("this is no file of metrics")
        (value,) = struct.unpack_from("=d", data, at)
        found.append((data[offset + _WORD : offset + _WORD + length].decode(errors="replace"), at, value))
        offset = at + _WORD
    return found
