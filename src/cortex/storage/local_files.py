"""List, read and write local files as if they were objects, without leaving a folder through links.

obstore's own listing of local folders stops at the first invalid name or circular link, so it is not used. Others may
write into folders of models or uploads, and change them at any time. Therefore what was opened is checked, by the
kernel's path of its descriptor, and not a path that could be another one a moment later.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from cortex.errors import StorageError
from cortex.storage.objects import StoredObject, flaw_of_name, printable

_BATCH = 1000
_NEVER = datetime.fromtimestamp(0, UTC)

_DENIED = "the file system denies access to it"
CIRCLE = "it is a link to one of its parent folders"
OUTSIDE = "a link leads out of the folder"
#: The kernel's `protected_hardlinks` normally prevents such links, but not on each file system.
_FOREIGN = "it is a hard link to a file of another user"
#: Errors of a single file. Any other error may concern the whole disk and fails the listing.
_FLAWS = {
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.ELOOP: CIRCLE,
    errno.ENAMETOOLONG: "its path is too long",
}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: A FIFO, which has no writer, must not block.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: `cortex dev` also runs on systems without O_PATH.
_REFERENCE = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC


def file_batches(path: Path, root: Path | None = None) -> Iterator[list[StoredObject]]:
    """Yield the file at `path`, or all files below it, in batches sorted by folder; blocks.

    Links are followed, except circular ones; those that lead out of `root` (default: `path`) are flaws, and for `path`
    itself an error. Special files are skipped. Yields nothing if `path` does not exist.
    Raises: OSError, StorageError if a folder is removed during the listing.
    """
    base = os.path.realpath(root or path)
    try:
        with _opened(path, _REFERENCE) as reference:
            found = os.fstat(reference)
            if not _is_within(reference, path, base):
                raise StorageError(f"{printable(str(path))}: {OUTSIDE}")
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISREG(found.st_mode):
        yield [_stored(str(path), "", found)]
    elif stat.S_ISDIR(found.st_mode):
        yield from _batches(_walk(str(path), base))


def prefix_batches(prefix: str, root: Path | None = None) -> Iterator[list[StoredObject]]:
    """Yield all files whose path begins with the absolute path `prefix`, like `file_batches`, named below its folder.

    As in a bucket, `/data/im` matches `/data/image.png` and `/data/images/1.png`; `/data/im/` matches neither.
    Without a `root`, links may lead anywhere. Raises: as `file_batches`.
    """
    folder, _, start = prefix.rpartition("/")
    if Path(folder or "/").is_dir():
        yield from _batches(_walk(folder or "/", os.path.realpath(root or "/"), start))


def copy(item: StoredObject, target: Path) -> None:
    """Copy a listed file to the new file `target`. Raises: OSError, StorageError if it changed since the listing.

    The ETag has the inode, so nothing else is copied, whatever the path leads to meanwhile.
    """
    path = Path("/") / item.key
    try:
        with _opened(path, _FILE) as descriptor, target.open("xb") as file:
            before = os.fstat(descriptor)
            if _etag(before) == item.etag:
                with os.fdopen(descriptor, "rb", closefd=False) as source:
                    shutil.copyfileobj(source, file)
            after = os.fstat(descriptor)
    except FileNotFoundError:
        raise StorageError(f"{printable(str(path))} was removed while it was read; try again") from None
    if {_etag(before), _etag(after)} != {item.etag}:
        raise StorageError(f"{printable(str(path))} changed while it was read; try again")


@contextlib.contextmanager
def reading(path: Path, root: Path | None = None) -> Iterator[FileIO]:
    """Open a regular file, unbuffered, for reading. Raises: OSError, StorageError if it is not below `root`."""
    base = os.path.realpath(root or "/")
    with _opened(path.parent, _REFERENCE) as folder, _opened(path.name, _FILE, folder) as file:
        found = os.fstat(file)
        flaw = _flaw_of(found, os.fstat(folder).st_uid) if root else None
        if flaw or not _is_within(file, path, base):
            raise StorageError(f"{printable(str(path))}: {flaw or OUTSIDE}")
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"{printable(str(path))} is not a file")
        with os.fdopen(file, "rb", buffering=0, closefd=False) as opened:
            yield opened


@contextlib.contextmanager
def writing(path: Path, root: Path | None = None) -> Iterator[BinaryIO]:
    """Create or replace a file, and the folders above it, when the block ends without an error.

    Raises: OSError, StorageError if its folder is not below `root`.
    """
    with _made_folder(path.parent, root) as folder:
        part = f".{uuid.uuid4().hex}.part"
        try:
            with open(part, "wb", opener=lambda name, _: os.open(name, _NEW_FILE, 0o666, dir_fd=folder)) as file:
                yield file
            os.rename(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise


def remove(path: Path, root: Path | None = None) -> None:
    """Remove a file. Raises: OSError, StorageError if its folder is not below `root`."""
    with _made_folder(path.parent, root) as folder:
        os.unlink(path.name, dir_fd=folder)


def _batches(found: Iterator[StoredObject]) -> Iterator[list[StoredObject]]:
    while batch := list(itertools.islice(found, _BATCH)):
        yield batch


def _walk(root: str, base: str, start: str = "") -> Iterator[StoredObject]:
    """Walk a folder iteratively, because folders may be deeper than Python's recursion limit.

    Of the folder's own entries, only those that begin with `start` are visited.
    """
    waiting: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(root, "", ())]
    while waiting:
        folder, name, above = waiting.pop()
        try:
            descriptor = os.open(folder, _FOLDER)
        except PermissionError:
            yield _flawed(folder, name, _DENIED, is_folder=True)
            continue
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(f"{printable(folder)} was removed while it was listed") from None
        try:
            if not _is_within(descriptor, folder, base):
                yield _flawed(folder, name, OUTSIDE, is_folder=True)
                continue
            own = os.fstat(descriptor)
            parents = (*above, (own.st_dev, own.st_ino))
            for entry in _sorted_entries(folder, descriptor):
                if not name and not entry.name.startswith(start):
                    continue
                path = f"{folder.rstrip('/')}/{entry.name}"
                below = f"{name}/{entry.name}" if name else entry.name
                try:
                    found, flaw = _examine(entry, descriptor, path, base)
                except FileNotFoundError:
                    continue  # a broken link, or just removed
                except OSError as error:
                    if error.errno not in _FLAWS:
                        raise
                    yield _flawed(path, below, _FLAWS[error.errno], entry.is_dir(follow_symlinks=False))
                    continue
                is_folder = stat.S_ISDIR(found.st_mode)
                if is_folder and not flaw and (found.st_dev, found.st_ino) in parents:
                    flaw = CIRCLE
                if flaw or (flaw := _flaw_of(found, own.st_uid)):
                    yield _flawed(path, below, flaw, is_folder)
                elif stat.S_ISREG(found.st_mode):
                    yield _stored(path, below, found)
                elif is_folder:
                    waiting.append((path, below, parents))
        finally:
            os.close(descriptor)


def _sorted_entries(folder: str, descriptor: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(descriptor) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{printable(folder)} was removed while it was listed") from None


def _examine(entry: os.DirEntry[str], folder: int, path: str, base: str) -> tuple[os.stat_result, str | None]:
    """Return the status of an entry, or of what its link leads to, and OUTSIDE if that is not below `base`."""
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        return found, None
    with _opened(entry.name, _REFERENCE, folder) as reference:
        return os.fstat(reference), None if _is_within(reference, path, base) else OUTSIDE


def _flaw_of(found: os.stat_result, owner: int) -> str | None:
    """Return why a file must not be read: in a folder of `owner`, a hard link to a file of another user."""
    is_foreign = stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and found.st_uid != owner
    return _FOREIGN if is_foreign else None


def _is_within(descriptor: int, path: Path | str, base: str) -> bool:
    """Return whether what was opened at `path` is the real path `base`, or below it."""
    if base == "/":
        return True
    if sys.platform == "linux":
        return Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(base)
    real = Path(path).resolve()
    return real.is_relative_to(base) and os.path.samestat(real.stat(), os.fstat(descriptor))


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _made_folder(path: Path, root: Path | None) -> Iterator[int]:
    """Open a folder; create it, and those between `root` and it, one by one: none outside of the root."""
    top = root or Path("/")
    top.mkdir(parents=True, exist_ok=True)
    base = os.path.realpath(top)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_opened(top, _REFERENCE | os.O_DIRECTORY))
        parts = path.relative_to(top).parts
        for depth, name in enumerate(parts, 1):
            try:
                folder = stack.enter_context(_opened(name, _REFERENCE | os.O_DIRECTORY, folder))
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
                folder = stack.enter_context(_opened(name, _REFERENCE | os.O_DIRECTORY, folder))
            if not _is_within(folder, top.joinpath(*parts[:depth]), base):
                raise StorageError(f"{printable(str(path))}: {OUTSIDE}")
        yield folder


def _stored(path: str, name: str, found: os.stat_result) -> StoredObject:
    modified_at = datetime.fromtimestamp(found.st_mtime, UTC)
    return StoredObject(path.strip("/"), name, found.st_size, _etag(found), modified_at, flaw_of_name(name))


def _flawed(path: str, name: str, flaw: str, is_folder: bool) -> StoredObject:
    """Return an entry that can't be read; the name of a folder ends in a slash."""
    if not name:
        raise StorageError(f"{printable(path)}: {flaw}")
    return StoredObject(path.strip("/"), f"{name}/" if is_folder else name, 0, flaw, _NEVER, flaw)


def _etag(found: os.stat_result) -> str:
    # The time of the last change of the status, because `cp -p` restores that of the last modification.
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_ctime_ns:x}-{found.st_size:x}"
