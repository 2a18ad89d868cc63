"""Keeps the unpacked projects, one folder per content hash, and deletes those that nothing uses any more."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from cortex.config.archive import unpack
from cortex.home import Home

#: Names that start with a dot are being filled or deleted; hashes never do.
_TEMPORARY = ".tmp-"


class ProjectFolders:
    """The folders under `CORTEX_HOME/projects`."""

    def __init__(self, home: Home) -> None:
        self._root = home.projects_dir

    def path(self, project_hash: str) -> Path:
        """Return the folder of a project; its code must not write there."""
        return self._root / project_hash

    @asynccontextmanager
    async def unpacked(self, archive: bytes) -> AsyncIterator[Path]:
        """Unpack an upload into a folder that lasts as long as the block. Raises: InputError."""
        folder = self._root / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            # It may take seconds, in which everything else goes on.
            await asyncio.to_thread(unpack, archive, folder)
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def adopt(self, folder: Path, project_hash: str) -> None:
        """Move an unpacked project to its place, unless the same one is there already."""
        place = self.path(project_hash)
        if not place.exists():
            folder.rename(place)

    def set_aside_unused(self, used: Collection[str]) -> list[Path]:
        """Move all projects but those whose hash is in `used` out of the way, for `delete`; takes no time."""
        doomed = [folder for folder in self._folders() if folder.name not in used]
        return [folder.rename(self._root / f"{_TEMPORARY}{secrets.token_hex(8)}") for folder in doomed]

    async def delete(self, folders: Collection[Path]) -> None:
        """Delete what was set aside."""
        for folder in folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def clean(self) -> None:
        """Delete what an operator that was killed left half done."""
        for folder in self._root.glob(".*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return [folder for folder in self._root.iterdir() if not folder.name.startswith(".")]
