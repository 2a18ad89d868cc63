"""List and copy local files as if they were objects.

obstore's own listing of local folders stops at the first invalid name or circular link, so it is not used.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cortex.errors import StorageError
from cortex.storage.objects import StoredObject, flaw_of_name, printable

_BATCH = 1000
_NEVER = datetime.fromtimestamp(0, UTC)

_DENIED = "the file system denies access to it"
CIRCLE = "it is a link to one of its parent folders"
#: Errors of a single file. Any other error may concern the whole disk and fails the listing.
_FLAWS = {
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.ELOOP: CIRCLE,
    errno.ENAMETOOLONG: "its path is too long",
}


def file_batches(root: Path) -> Iterator[list[StoredObject]]:
    """Yield the file at `root`, or all files below it, in batches sorted by folder; blocks.

    Links are followed, except circular ones. Special files are skipped. Yields nothing if `root` does not exist.
    Raises: OSError, StorageError if a folder is removed during the listing.
    """
    try:
        found = root.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISREG(found.st_mode):
        yield [_stored(str(root), "", found)]
    if not stat.S_ISDIR(found.st_mode):
        return
    batch: list[StoredObject] = []
    for item in _walk(str(root), _identity(found)):
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def prefix_batches(prefix: str) -> Iterator[list[StoredObject]]:
    """Yield all files whose path begins with the absolute path `prefix`, like `file_batches`.

    As in a bucket, `/data/im` matches `/data/image.png` and `/data/images/1.png`; `/data/im/` matches neither.
    Raises: as `file_batches`.
    """
    folder, _, start = prefix.rpartition("/")
    parent = Path(folder or "/")
    if not parent.is_dir():
        return
    roots = [parent]
    if start:
        roots = [Path(entry.path) for entry in _sorted_entries(str(parent)) if entry.name.startswith(start)]
    batch: list[StoredObject] = []
    for root in roots:
        for found in file_batches(root):
            batch += found
            if len(batch) >= _BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def copy(item: StoredObject, target: Path) -> None:
    """Copy a listed file to the new file `target`. Raises: OSError, StorageError if it changed since the listing."""
    path = Path("/") / item.key
    try:
        with path.open("rb") as source, target.open("xb") as file:
            before = os.fstat(source.fileno())
            if _etag(before) == item.etag:
                shutil.copyfileobj(source, file)
            after = os.fstat(source.fileno())
    except FileNotFoundError:
        raise StorageError(f"{printable(str(path))} was removed while it was read; try again") from None
    if {_etag(before), _etag(after)} != {item.etag}:
        raise StorageError(f"{printable(str(path))} changed while it was read; try again")


def _walk(root: str, identity: tuple[int, int]) -> Iterator[StoredObject]:
    """Walk a folder iteratively, because folders may be deeper than Python's recursion limit."""
    waiting: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(root, "", (identity,))]
    while waiting:
        folder, name, above = waiting.pop()
        try:
            entries = _sorted_entries(folder)
        except PermissionError:
            yield _flawed(folder, name, _DENIED)
            continue
        for entry in entries:
            below = f"{name}/{entry.name}" if name else entry.name
            try:
                found = entry.stat()
            except FileNotFoundError:
                continue  # a broken link, or just removed
            except OSError as error:
                if error.errno not in _FLAWS:
                    raise
                yield _flawed(entry.path, below, _FLAWS[error.errno])
                continue
            if stat.S_ISREG(found.st_mode):
                yield _stored(entry.path, below, found)
            elif stat.S_ISDIR(found.st_mode):
                if _identity(found) in above:
                    yield _flawed(entry.path, below, CIRCLE)
                else:
                    waiting.append((entry.path, below, (*above, _identity(found))))


def _sorted_entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{printable(folder)} was removed while it was listed") from None


def _stored(path: str, name: str, found: os.stat_result) -> StoredObject:
    modified_at = datetime.fromtimestamp(found.st_mtime, UTC)
    return StoredObject(path.strip("/"), name, found.st_size, _etag(found), modified_at, flaw_of_name(name))


def _flawed(path: str, name: str, flaw: str) -> StoredObject:
    if not name:
        raise StorageError(f"{printable(path)}: {flaw}")
    return StoredObject(path.strip("/"), name, 0, flaw, _NEVER, flaw)


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
