"""The last predictions of a process by request id, in a file mapped into memory, for truth that comes later.

A file is a header and a ring of records of one size: an id, filled up with zeros, and a value. It is written with plain
stores and outlives its process, whatever that is killed in; the next process goes on with it. A value is a double, or
the hash of a class. It knows nothing of what is done with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import struct
from collections.abc import Collection
from enum import IntEnum
from pathlib import Path

#: So many predictions of each process are kept.
KEPT_PREDICTIONS = 65_536
#: Where the files are, in the folder of a replica's metrics.
FOLDER = "predictions"
#: The gateway's ids have 32 characters at most.
ID_BYTES = 40

_MAGIC = 0x78657472_6F633031
_HEADER = struct.Struct("=QQQ")  # what the file is, its kind, how many records were ever written
_HEADER_BYTES = 64
_COUNT_WORD = 2
_CLASS = struct.Struct(f"={ID_BYTES}sQ")
_NUMBER = struct.Struct(f"={ID_BYTES}sd")
_RECORD_BYTES = _NUMBER.size
_FILE_BYTES = _HEADER_BYTES + KEPT_PREDICTIONS * _RECORD_BYTES
#: A search costs less than a walk through the records while so few are looked for.
_SEARCHED = 16


class PredictionKind(IntEnum):
    """What the values of a file are."""

    CLASS = 1  #: `class_hash` of a class's name
    NUMBER = 2


class PredictionRing:
    """The ring that one process writes, one thread at a time."""

    def __init__(self, folder: Path, kind: PredictionKind) -> None:
        """Take the first file that no living process writes. Raises: OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Kept open: with it goes the lock, which the kernel frees when the process ends. Forks do not inherit it.
        self._descriptor = _lock_one(folder)
        os.posix_fallocate(self._descriptor, 0, _FILE_BYTES)  # a store where no memory is left would end the process
        self._memory = mmap.mmap(self._descriptor, _FILE_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._pack = (_CLASS if kind is PredictionKind.CLASS else _NUMBER).pack_into
        magic, known_kind, count = _HEADER.unpack_from(self._memory)
        self._count = count if (magic, known_kind) == (_MAGIC, kind) else 0
        _HEADER.pack_into(self._memory, 0, _MAGIC, kind, self._count)

    def append(self, request_id: bytes, value: float) -> None:
        """Keep a prediction, in place of the oldest where the ring is full; one without an id can't be found again."""
        self._pack(self._memory, _HEADER_BYTES + self._count % KEPT_PREDICTIONS * _RECORD_BYTES, request_id, value)
        self._count += 1
        self._words[_COUNT_WORD] = self._count


def class_hash(name: str) -> int:
    """Return the number by which a ring knows a class."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def find_predictions(path: Path, kind: PredictionKind, ids: Collection[str]) -> dict[str, float | int]:
    """Return the values in one file of those requests that it knows; nothing if it is of another kind, or gone."""
    with contextlib.suppress(OSError, struct.error):
        data = path.read_bytes()
        magic, known_kind, count = _HEADER.unpack_from(data)
        if (magic, known_kind) == (_MAGIC, kind):
            record = _CLASS if kind is PredictionKind.CLASS else _NUMBER
            wanted = {padded: request_id for request_id in ids if (padded := _padded(request_id))}
            used = data[_HEADER_BYTES : _HEADER_BYTES + min(count, KEPT_PREDICTIONS) * _RECORD_BYTES]
            return _search(used, record, wanted) if len(wanted) <= _SEARCHED else _walk(used, record, wanted)
    return {}


def copy_predictions(source: Path, target: Path) -> None:
    """Copy what a file knows, whole or not at all; nothing where it knows nothing. Raises: OSError."""
    data = source.read_bytes()
    if len(data) < _HEADER_BYTES:
        return
    magic, _, count = _HEADER.unpack_from(data)
    if magic == _MAGIC and count:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        part.write_bytes(data[: _HEADER_BYTES + min(count, KEPT_PREDICTIONS) * _RECORD_BYTES])
        part.replace(target)


def _padded(request_id: str) -> bytes | None:
    """Return the id as it is kept, whole; None for one that can't be."""
    with contextlib.suppress(UnicodeEncodeError):
        data = request_id.encode("latin-1")
        return data.ljust(ID_BYTES, b"\0") if 0 < len(data) <= ID_BYTES else None
    return None


def _search(data: bytes, record: struct.Struct, wanted: dict[bytes, str]) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for padded, request_id in wanted.items():
        at = data.find(padded)
        while at >= 0 and at % _RECORD_BYTES:  # bytes of two records, in one row by chance
            at = data.find(padded, at + 1)
        if at >= 0 and at + _RECORD_BYTES <= len(data):
            found[request_id] = record.unpack_from(data, at)[1]
    return found


def _walk(data: bytes, record: struct.Struct, wanted: dict[bytes, str]) -> dict[str, float | int]:
    whole = data[: len(data) // _RECORD_BYTES * _RECORD_BYTES]
    return {wanted[padded]: value for padded, value in record.iter_unpack(whole) if padded in wanted}


def _lock_one(folder: Path) -> int:
    for number in itertools.count():
        descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    raise AssertionError("there is always a next number")
