"""Keeps projects in the database, where operators on several machines share one: who takes over finds them there."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from cortex.cluster.archives import Archives
from cortex.config.archive import unpack
from cortex.errors import CortexError
from cortex.home import Home
from cortex.operator.deploy.projects import ProjectFolders
from cortex.state.projects import ProjectStore
from cortex.telemetry import Logger


class SharedProjects:
    """Copies between the home's folders and the database."""

    def __init__(self, home: Home, store: ProjectStore, logger: Logger) -> None:
        self._folders = ProjectFolders(home)
        self._archives = Archives(home, "shared-archives")
        self._store = store
        self._logger = logger

    async def save(self, project_hash: str, folder: Path) -> None:
        """Store the project in a folder; returns once others have it. Raises: CortexError, OSError."""
        path, _ = await self._archives.get(project_hash, folder)
        try:
            await asyncio.to_thread(self._store.put, project_hash, path)
        finally:
            path.unlink(missing_ok=True)

    async def fetch(self, hashes: Collection[str]) -> None:
        """Unpack those of these projects that have no folder here; one that can't be had is told of.

        All others are removed from the database: to be called before anything is deployed.
        """
        await asyncio.to_thread(self._store.keep_only, hashes)
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
