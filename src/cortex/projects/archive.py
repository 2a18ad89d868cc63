"""Zip archives of project folders: rules for file names and sizes, and safe unpacking."""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
import stat
import struct
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cortex.errors import InputError, format_size

#: Total size of a project, unpacked.
MAX_PROJECT_BYTES = 512 * 1024 * 1024
#: A larger count usually means a virtual environment or a data set in the folder. Keeps archives below zip64.
MAX_PROJECT_FILES = 50_000
IGNORE_NAME = ".cortexignore"

_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 1024
#: Far below Python's recursion limit: a project is scanned, copied and deleted folder by folder.
_MAX_FOLDERS = 100
#: Room for 50,000 entries with long names; bounds the memory of parsing to about 100 MB.
_MAX_DIRECTORY_BYTES = 16 * 1024 * 1024
#: Deflate compresses 1032:1 at most; a higher ratio means overlapping entries.
_MAX_RATIO = 1100
_CHUNK_BYTES = 1024 * 1024


def archive_hash(data: bytes) -> str:
    """Return the `content_hash` of the project in an archive, without unpacking it. Raises: InputError as `unpack`."""
    digest = hashlib.sha256()
    with _opened(data) as packed:
        for entry in sorted(_checked_entries(packed, len(data)), key=lambda item: item.filename):
            with _entry_data(packed, entry) as file:
                hash_entry(digest, entry.filename, is_executable(entry.external_attr >> 16), file)
    return digest.hexdigest()


def unpack(data: bytes, destination: Path) -> None:
    """Unpack an archive into the new folder `destination` atomically.

    An existing folder is left unchanged: name folders by `archive_hash`.
    Raises: InputError if the archive contains anything but plain files with relative names within the limits.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _opened(data) as packed:
        entries = _checked_entries(packed, len(data))
        if destination.exists():
            return
        building = Path(tempfile.mkdtemp(prefix=".unpack-", dir=destination.parent))
        try:
            for entry in entries:
                target = building / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with _entry_data(packed, entry) as source, target.open("xb") as file:
                    shutil.copyfileobj(source, file, _CHUNK_BYTES)
                if is_executable(entry.external_attr >> 16):
                    target.chmod(target.stat().st_mode | 0o111)
            building.rename(destination)
        except OSError as error:
            # Another process unpacked the same content first.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)


def name_problem(path: str) -> str | None:
    """Return why `path` is not a valid file name in a project, or None. Packing and unpacking use the same rules."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    if any(unicodedata.category(character) == "Cc" for character in path):
        return "has a control character in its name"
    if "\\" in path:
        return "has a backslash in its name"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not a plain relative path"
    if len(encoded) > _MAX_PATH_BYTES or any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
        return "has too long a name"
    if len(parts) - 1 > _MAX_FOLDERS:
        return f"is in more than {_MAX_FOLDERS} nested folders"
    return None


def too_big(where: str = "") -> str:
    """Return the message for a project over `MAX_PROJECT_BYTES`; `where` names its largest part."""
    hint = f"; most of it is in {where}" if where else ""
    return f"the project has more than {format_size(MAX_PROJECT_BYTES)}{hint}; list what is not needed in {IGNORE_NAME}"


def too_many(where: str = "") -> str:
    """Return the message for a project over `MAX_PROJECT_FILES`; `where` names the part with most files."""
    hint = f"; most of them are in {where}" if where else ""
    return f"the project has more than {MAX_PROJECT_FILES:,} files{hint}; list what is not needed in {IGNORE_NAME}"


def is_executable(mode: int) -> bool:
    """Return True if the owner may execute a file of this mode."""
    return bool(mode & stat.S_IXUSR)


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file in chunks of bounded size."""
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def hash_entry(digest: hashlib._Hash, name: str, executable: bool, file: IO[bytes]) -> None:
    """Add one file to the hash of a project."""
    content = hashlib.sha256()
    for chunk in chunks(file):
        content.update(chunk)
    # Names contain no newline, so different projects never produce the same bytes.
    digest.update(f"{content.hexdigest()} {'x' if executable else '-'} {name}\n".encode())


def _opened(data: bytes) -> zipfile.ZipFile:
    """Open a zip file after checking that its central directory is small. Raises: InputError."""
    # Archives of `pack` and `zip` end in a 22-byte record without a comment, and have no zip64 record before it.
    tail = data[-22:]
    if len(tail) < 22 or tail[:4] != b"PK\5\6" or data[-42:-38] == b"PK\6\7":
        raise InputError("the project is not a plain zip file")
    directory_bytes: int = struct.unpack_from("<L", tail, 12)[0]
    if directory_bytes > _MAX_DIRECTORY_BYTES:
        raise InputError(too_many())
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError, ValueError, struct.error) as error:
        raise InputError(f"the project is not a readable zip file: {error}") from error


def _checked_entries(packed: zipfile.ZipFile, archive_bytes: int) -> list[zipfile.ZipInfo]:
    """Return the files of an archive after validating each. Raises: InputError."""
    entries = [entry for entry in packed.infolist() if not _is_plain_folder(entry)]
    if len(entries) > MAX_PROJECT_FILES:
        raise InputError(too_many())
    if sum(entry.file_size for entry in entries) > MAX_PROJECT_BYTES:
        raise InputError(too_big())
    if sum(entry.compress_size for entry in entries) > archive_bytes:
        raise InputError("the project's archive has overlapping files")
    files: set[str] = set()
    for entry in entries:
        # zipfile cuts names at a NUL; check the whole name.
        if problem := name_problem(entry.orig_filename) or _entry_problem(entry):
            raise InputError(f"{entry.orig_filename!r} in the project's archive {problem}")
        if entry.filename in files:
            raise InputError(f"{entry.filename!r} occurs twice in the project's archive")
        files.add(entry.filename)
    for name in files:
        parent = name.rpartition("/")[0]
        while parent:
            if parent in files:
                raise InputError(f"{parent!r} is both a file and a folder in the project's archive")
            parent = parent.rpartition("/")[0]
    return entries


def _is_plain_folder(entry: zipfile.ZipInfo) -> bool:
    """Return True for a folder entry, as `zip -r` writes; folders are created from file names."""
    return entry.filename.endswith("/") and name_problem(entry.filename[:-1]) is None and entry.file_size == 0


def _entry_problem(entry: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        return "is a link or a special file"
    if entry.header_offset < 0:
        return "is truncated"
    if entry.flag_bits & 0x1:
        return "is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "uses an unsupported compression method"
    if entry.file_size > _MAX_RATIO * max(entry.compress_size, 1):
        return "has an impossible compression ratio"
    return None


@contextmanager
def _entry_data(packed: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
    """Open an entry for reading; convert errors in its data to InputError."""
    try:
        with packed.open(entry) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError, struct.error) as error:
        raise InputError(f"{entry.filename!r} in the project's archive is damaged: {error}") from error
