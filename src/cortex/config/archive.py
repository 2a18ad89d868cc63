"""Archives of project folders: the rules of names and limits, and the one door through which one is unpacked.

Knows nothing of what a project's files mean.
"""

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

from cortex.errors import InputError

#: All files of a project together, unpacked.
MAX_PROJECT_BYTES = 512 * 1024 * 1024
#: More than this is a virtual environment or a data set that landed in the folder; it also keeps archives below zip64.
MAX_PROJECT_FILES = 50_000
IGNORE_NAME = ".cortexignore"

_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 1024
#: 50,000 entries with long names fit; parsing stays below some 100 MB whatever is sent.
_MAX_DIRECTORY_BYTES = 16 * 1024 * 1024
#: Deflate can't do better than 1032:1, so more means entries that overlap.
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
    """Unpack an archive into the new folder `destination`, all of it or nothing.

    A folder that is already there is left as it is: name folders by `archive_hash`.
    Raises: InputError if the archive is not one of plain files under plain relative names within the limits.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _opened(data) as packed:
        entries = _checked_entries(packed, len(data))
        if destination.exists():
            return
        building = Path(tempfile.mkdtemp(prefix=".unpack-", dir=destination.parent))
        try:
            for entry in entries:
                _extract(packed, entry, building)
            building.rename(destination)
        except OSError as error:
            # Somebody else was faster with the same content.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)


def name_problem(path: str) -> str | None:
    """Say why `path` can't be the name of a project's file; the same rules hold on both sides of an archive."""
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
    return None


def too_big(where: str = "") -> str:
    """Say that a project is over `MAX_PROJECT_BYTES`, and `where` most of it is."""
    hint = f"; most of it is in {where}" if where else ""
    return (
        f"the project has more than {MAX_PROJECT_BYTES // 1024**2} MiB{hint}; list what is not needed in {IGNORE_NAME}"
    )


def too_many(where: str = "") -> str:
    """Say that a project is over `MAX_PROJECT_FILES`, and `where` most of them are."""
    hint = f"; most of them are in {where}" if where else ""
    return f"the project has more than {MAX_PROJECT_FILES:,} files{hint}; list what is not needed in {IGNORE_NAME}"


def is_executable(mode: int) -> bool:
    """Tell whether the owner may execute a file of this mode."""
    return bool(mode & stat.S_IXUSR)


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Read a file to its end in pieces of bounded size."""
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def hash_entry(digest: hashlib._Hash, name: str, executable: bool, file: IO[bytes]) -> None:
    """Add one file to the hash of a project."""
    content = hashlib.sha256()
    for chunk in chunks(file):
        content.update(chunk)
    # Names hold no newline, so no two projects give the same bytes.
    digest.update(f"{content.hexdigest()} {'x' if executable else '-'} {name}\n".encode())


def _opened(data: bytes) -> zipfile.ZipFile:
    """Open a zip file whose list of entries is known to be small. Raises: InputError."""
    # Exactly what `pack` and `zip` write ends in 22 bytes without a comment, and has no zip64 record before them.
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
    """Return the files of an archive, every one of them checked. Raises: InputError."""
    entries = [entry for entry in packed.infolist() if not _is_plain_folder(entry)]
    if len(entries) > MAX_PROJECT_FILES:
        raise InputError(too_many())
    if sum(entry.file_size for entry in entries) > MAX_PROJECT_BYTES:
        raise InputError(too_big())
    if sum(entry.compress_size for entry in entries) > archive_bytes:
        raise InputError("the project's archive has overlapping files")
    files: set[str] = set()
    for entry in entries:
        # The library cuts names at a NUL; the whole one is what has to be good.
        if problem := name_problem(entry.orig_filename) or _entry_problem(entry):
            raise InputError(f"{entry.orig_filename!r} in the project's archive {problem}")
        if entry.filename in files:
            raise InputError(f"{entry.filename!r} is twice in the project's archive")
        files.add(entry.filename)
    for name in files:
        parent = name.rpartition("/")[0]
        while parent:
            if parent in files:
                raise InputError(f"{parent!r} is both a file and a folder in the project's archive")
            parent = parent.rpartition("/")[0]
    return entries


def _is_plain_folder(entry: zipfile.ZipInfo) -> bool:
    """Tell whether an entry only announces a folder, as `zip -r` writes; folders come from the names of files."""
    return entry.filename.endswith("/") and name_problem(entry.filename[:-1]) is None and entry.file_size == 0


def _entry_problem(entry: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        return "is a link or a special file"
    if entry.header_offset < 0:
        return "is not all there"
    if entry.flag_bits & 0x1:
        return "is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is packed in an unknown way"
    if entry.file_size > _MAX_RATIO * max(entry.compress_size, 1):
        return "unpacks to more than it can"
    return None


@contextmanager
def _entry_data(packed: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
    """Open an entry for reading; whatever is wrong with its data becomes an InputError."""
    try:
        with packed.open(entry) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError, struct.error) as error:
        raise InputError(f"{entry.filename!r} in the project's archive is damaged: {error}") from error


def _extract(packed: zipfile.ZipFile, entry: zipfile.ZipInfo, folder: Path) -> None:
    target = folder / entry.filename
    target.parent.mkdir(parents=True, exist_ok=True)
    with _entry_data(packed, entry) as source, target.open("xb") as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)
    if is_executable(entry.external_attr >> 16):
        target.chmod(target.stat().st_mode | 0o111)
