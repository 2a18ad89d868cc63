"""Backups of a home: one zip file with databases, projects and settings. Taken while an operator runs.

The last entry, `manifest.json`, has the SHA-256 of each other one. Environments, logs and whatever belongs to processes
are left out: an operator makes them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import stat
import tempfile
import zipfile
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cortex.errors import ConflictError, CortexError, InputError, NotFoundError, format_size
from cortex.home import Home
from cortex.installation import RESTORED, Installation
from cortex.projects.archive import chunks, is_executable, name_problem
from cortex.state.database import open_jobs_sqlite, open_sqlite
from cortex.state.database_copies import back_up

#: Folders that a backup has only if they are requested.
OPTIONAL = ("recordings", "models")

_MANIFEST = "manifest.json"
_FORMAT = 1
_SETTINGS = ("token", "installation.json", "cli.json")
_FILES = (*_SETTINGS, "state.db", "jobs.db")
_FOLDERS = ("projects", "predictions", *OPTIONAL)
_NEEDED_PROJECTS = {
    "state.db": "SELECT project_hash FROM apis UNION SELECT project_hash FROM serving_revisions"
    " UNION SELECT project_hash FROM api_history",
    "jobs.db": "SELECT json_extract(origin, '$.project_hash') FROM job_inputs JOIN jobs USING (number)"
    " WHERE ended_at IS NULL",
}
#: Backups in which a project was deleted meanwhile begin again.
_ATTEMPTS = 20


def write_backup(home: Home, target: Path, version: str, optional: Collection[str] = ()) -> None:
    """Write a backup of a home to a new file, readable only by its owner, or nothing.

    `version` is that of cortex, `optional` are folders of `OPTIONAL`. Raises: CortexError.
    """
    if os.path.lexists(target):
        raise ConflictError(f"{target} exists; choose another name")
    databases = (home.jobs_database_file, home.database_file) if Installation.read(home).database is None else ()
    if databases and not home.database_file.exists():
        raise NotFoundError(f"CORTEX_HOME={home.path} has no installation to back up")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".cortex-backup-") as folder:
            part = Path(folder) / target.name
            with zipfile.ZipFile(part, "x") as archive:
                writer = _Writer(archive)
                copies = _copy_databases(home, databases, Path(folder), writer)
                for copy in copies.iterdir():
                    _check_database(copy, home.path / copy.name)
                    writer.add(copy, copy.name)
                for name in _SETTINGS:
                    writer.add(home.path / name, name)
                for name in ("predictions", *optional):
                    writer.add_folder(home.path, name)
                manifest = {"format": _FORMAT, "version": version, "created_at": datetime.now(UTC).isoformat()}
                archive.writestr(_entry(_MANIFEST), json.dumps({**manifest, "files": writer.digests}, indent=1))
            part.chmod(0o600)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(target)
    except OSError as error:
        raise CortexError(f"the backup can't be written: {error}") from None


def restore_backup(file: Path, home: Home) -> None:
    """Restore a backup into a home without an installation, or nothing. No operator may run.

    After a process was killed, the next call begins again, or completes what is verified and only has to be moved.
    Raises: InputError if the file is not a complete backup; ConflictError if the home is not empty; CortexError.
    """
    part, restored = home.path / f"{RESTORED}.partial", home.path / RESTORED
    try:
        if not restored.exists():
            shutil.rmtree(part, ignore_errors=True)
            with zipfile.ZipFile(file) as archive:
                _unpack(archive, home, part)
            _check_restored(Home(part))
            os.sync()
            part.rename(restored)
        for entry in restored.iterdir():
            place = home.path / entry.name
            if place.is_dir():  # empty
                place.rmdir()
            entry.rename(place)
        restored.rmdir()
    except CortexError:
        raise
    except OSError as error:
        raise CortexError(f"{file} can't be restored into {home.path}: {error}") from None
    except Exception as error:  # whatever `zipfile` raises
        raise InputError(f"{file} is not a complete backup: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@dataclass
class _Writer:
    archive: zipfile.ZipFile
    digests: dict[str, str] = field(default_factory=dict)

    def add_folder(self, home: Path, name: str) -> None:
        for folder, _, files in os.walk(home / name):
            for file in files:
                path = Path(folder, file)
                self.add(path, str(path.relative_to(home)))

    def add(self, path: Path, name: str) -> None:
        """Add a file, unless it was added before or is gone."""
        try:
            mode = path.lstat().st_mode
            if name in self.digests or not stat.S_ISREG(mode):
                return
            if problem := name_problem(name):
                raise InputError(f"{path} {problem}, so it can't be backed up")
            with path.open("rb") as source:
                digest = hashlib.sha256()
                with self.archive.open(_entry(name, mode), "w", force_zip64=True) as target:
                    for chunk in chunks(source):
                        digest.update(chunk)
                        target.write(chunk)
            self.digests[name] = digest.hexdigest()
        except FileNotFoundError:
            return


def _entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (stat.S_IFREG | (0o700 if is_executable(mode) else 0o600)) << 16
    return entry


def _copy_databases(home: Home, databases: Collection[Path], folder: Path, writer: _Writer) -> Path:
    """Copy the databases, and add the projects that they need; return the folder of the copies.

    The jobs come first: each one in its copy then has its API in the other, unless that was deleted in between.
    """
    lost: set[str] = set()
    for attempt in range(_ATTEMPTS):
        copies = folder / f"databases-{attempt}"
        back_up(databases, copies)
        found = _projects(home)
        for name, _ in sorted(found):
            writer.add_folder(home.path, f"projects/{name}")
        missing = _needed_projects(copies) - {name for name, _ in found & _projects(home)}
        if missing == lost:  # normally none; those that stay away were missing before
            return copies
        lost = missing  # deleted meanwhile: the next copies do not need them
        shutil.rmtree(copies)
    raise ConflictError("projects were deleted during each attempt of the backup; try again later")


def _needed_projects(copies: Path) -> set[str]:
    needed: set[str] = set()
    for file in copies.iterdir():
        # An older version has fewer tables. Whether the file is damaged is checked afterwards.
        with closing(sqlite3.connect(file)) as connection, contextlib.suppress(sqlite3.DatabaseError):
            needed.update(name for (name,) in connection.execute(_NEEDED_PROJECTS[file.name]))
    return needed


def _projects(home: Home) -> set[tuple[str, int]]:
    """Return names and inodes of the project folders: one that was deleted and deployed again has another inode."""
    with os.scandir(home.projects_dir) as folders:
        return {(folder.name, folder.inode()) for folder in folders if not folder.name.startswith(".")}


def _check_database(copy: Path, original: Path) -> None:
    try:
        with closing(sqlite3.connect(copy)) as connection:
            (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        problem = str(error)
    if problem != "ok":
        raise CortexError(f"{original} is damaged: {problem}; restore an earlier backup")


def _unpack(archive: zipfile.ZipFile, home: Home, folder: Path) -> None:
    """Unpack a backup into a new folder, and compare each file with its digest. Raises: InputError, ConflictError."""
    manifest = json.loads(archive.read(_MANIFEST))
    if manifest["format"] > _FORMAT:
        raise InputError(f"the backup was written by version {manifest['version']}: restore it with that version")
    digests, entries = manifest["files"], archive.infolist()
    if sorted(entry.filename for entry in entries) != sorted([*digests, _MANIFEST]):
        raise ValueError("its entries are not those of its manifest")
    for name in digests:
        if name not in _FILES and (name_problem(name) or "/" not in name or name.split("/")[0] not in _FOLDERS):
            raise ValueError(f"{name!r} does not belong to a home")
    _check_empty(home, {name.split("/")[0] for name in digests})
    size, free = sum(entry.file_size for entry in entries), shutil.disk_usage(home.path).free
    if size > free:
        raise CortexError(f"the backup needs {format_size(size)}, and the disk of {home.path} has {format_size(free)}")
    folder.mkdir(mode=0o700)
    for entry in entries:
        if entry.filename != _MANIFEST:
            _extract(archive, entry, folder / entry.filename, digests[entry.filename])


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, wanted: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(entry) as source, path.open("xb") as target:
        path.chmod(0o700 if is_executable(entry.external_attr >> 16) else 0o600)
        for chunk in chunks(source):
            digest.update(chunk)
            target.write(chunk)
    if digest.hexdigest() != wanted:
        raise ValueError(f"{entry.filename} has changed")


def _check_empty(home: Home, names: Collection[str]) -> None:
    databases = {file.name for pattern in ("state.db*", "jobs.db*") for file in home.path.glob(pattern)}
    for name in sorted({*names, *databases, home.token_file.name}):
        path = home.path / name
        if any(path.iterdir()) if path.is_dir() else os.path.lexists(path):
            raise ConflictError(f"CORTEX_HOME={home.path} already has {name}: restore into another, empty folder")


def _check_restored(home: Home) -> None:
    """Check the settings, and migrate the databases to this version. Raises: CortexError."""
    if Installation.read(home).database is not None:
        return
    if not home.database_file.exists():
        raise InputError("the backup has no database")
    open_sqlite(home.database_file).dispose()
    open_jobs_sqlite(home.jobs_database_file).dispose()
