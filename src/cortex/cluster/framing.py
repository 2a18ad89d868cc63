"""The files of one folder as bytes, to be sent and to be written anew. Names are relative, with forward slashes."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

#: While a supervisor moves numbers from one file to another, what was read first does not fit what was read last.
_ATTEMPTS = 10


def pack(folder: Path) -> bytes:
    """Return the files of a folder as they were at one moment; those that vanish meanwhile are left out."""
    before = _read(folder)
    for _ in range(_ATTEMPTS):
        after = _read(folder)
        if set(before) == set(after) and before.get("ended.json") == after.get("ended.json"):
            break
        before = after
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for name, data in before.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Return what `pack` was given. Raises: tarfile.TarError."""
    with tarfile.open(fileobj=io.BytesIO(data)) as packed:
        files = {entry.name: packed.extractfile(entry) for entry in packed if entry.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None and _is_inside(name)}


def store(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make the folder have these files and no others; each is there whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(data)
        part.rename(path)
    for old in _names(folder) - set(files):
        (folder / old).unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, bytes]:
    found = {}
    for name in sorted(_names(folder)):
        with contextlib.suppress(OSError):
            found[name] = (folder / name).read_bytes()
    return found


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
