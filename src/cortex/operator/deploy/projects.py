"""Unpacked projects: one folder per content hash, and a copy in the database if several operators share one."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

from cortex.errors import ConfigError, CortexError
from cortex.home import Home
from cortex.projects.archive import unpack
from cortex.projects.dotenv import read_dotenv
from cortex.state.queries.projects import ProjectStore
from cortex.telemetry import Logger

#: Prefix of folders that are being filled or deleted; hashes never start with a dot.
_TEMPORARY = ".tmp-"


class ProjectFolders:
    """The folders under `CORTEX_HOME/projects`."""

    def __init__(self, home: Home) -> None:
        self._root = home.projects_dir

    def path(self, project_hash: str) -> Path:
        """Return the folder of a project. It is immutable: its code must not write there."""
        return self._root / project_hash

    @asynccontextmanager
    async def unpacked(self, archive: bytes) -> AsyncIterator[Path]:
        """Unpack an upload into a folder that exists as long as the block. Raises: InputError."""
        folder = self._temporary()
        try:
            # On a thread: it may take seconds.
            await asyncio.to_thread(unpack, archive, folder)
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def adopt(self, folder: Path, project_hash: str) -> None:
        """Move an unpacked project to its final folder, unless that exists."""
        path = self.path(project_hash)
        if not path.exists():
            folder.rename(path)

    def set_aside_unused(self, used: Collection[str]) -> list[Path]:
        """Rename all projects but those whose hash is in `used`; return the new folders for `delete`. Fast."""
        unused = [folder for folder in self._root.iterdir() if not folder.name.startswith(".")]
        return [folder.rename(self._temporary()) for folder in unused if folder.name not in used]

    async def delete(self, folders: Collection[Path]) -> None:
        """Delete folders returned by `set_aside_unused`."""
        for folder in folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def clean(self) -> None:
        """Delete the temporary folders of an operator that was killed."""
        for folder in self._root.glob(".*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _temporary(self) -> Path:
        return self._root / f"{_TEMPORARY}{secrets.token_hex(8)}"


class SharedProjects:
    """Projects in the database that several operators share: a new leader fetches them from there."""

    def __init__(self, home: Home, store: ProjectStore, logger: Logger) -> None:
        from cortex.cluster.archives import ProjectArchives  # noqa: PLC0415 - as in operator/infrastructure.py

        self._folders = ProjectFolders(home)
        self._archives = ProjectArchives(home, "shared-archives")
        self._store = store
        self._logger = logger

    async def save(self, project_hash: str, folder: Path) -> None:
        """Store the project in a folder. Raises: CortexError, OSError."""
        path, _ = await self._archives.get(project_hash, folder)
        try:
            await asyncio.to_thread(self._store.put, project_hash, path)
        finally:
            path.unlink(missing_ok=True)

    async def keep_only(self, hashes: Collection[str]) -> None:
        """Delete all other projects from the database: call it before anything is deployed."""
        await asyncio.to_thread(self._store.keep_only, hashes)

    async def fetch(self, hashes: Collection[str]) -> None:
        """Unpack those of these projects that have no folder here; log those that fail."""
        for project_hash in hashes:
            if not self._folders.path(project_hash).exists():
                await asyncio.to_thread(self._fetch, project_hash)

    def _fetch(self, project_hash: str) -> None:
        try:
            archive = b"".join(self._store.get(project_hash))
            if archive:
                unpack(archive, self._folders.path(project_hash))
                self._logger.info("project fetched from the database", project=project_hash)
            else:
                self._logger.error("project is missing; deploy it again", project=project_hash)
        except (CortexError, OSError) as error:
            self._logger.error("project can't be fetched", project=project_hash, error=error)


def dotenv_of(project: Path) -> Mapping[str, str]:
    """Return the variables of the `.env` of a project, which never changes; none while its folder is missing."""
    return _read_dotenv(project) if project.is_dir() else {}


@lru_cache(256)
def _read_dotenv(project: Path) -> Mapping[str, str]:
    try:
        return read_dotenv(project)
    except ConfigError:  # an older version accepted it
        return {}
