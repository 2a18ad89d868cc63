"""Archives of projects for nodes. Each is created once, for the first node that needs it."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from cortex.errors import InputError
from cortex.home import Home
from cortex.projects.archive import archive_hash
from cortex.projects.project import ProjectFiles, pack

_HASH = re.compile(r"[0-9a-f]{64}")


def validate_project_hash(project_hash: str) -> str:
    """Return the hash, which is safe as the name of a folder. Raises: InputError for any other text."""
    if not _HASH.fullmatch(project_hash):
        raise InputError(f"{project_hash!r} is not the hash of a project")
    return project_hash


class ProjectArchives:
    """Archive files in a private folder of the operator's home."""

    def __init__(self, home: Home, name: str = "archives") -> None:
        self._home = home
        self._folder = home.run_dir / name
        self._locks: dict[str, asyncio.Lock] = {}
        self._digests: dict[str, str] = {}

    async def get(self, project_hash: str, folder: Path | None = None) -> tuple[Path, str]:
        """Return the archive of a project and its digest. The project is in `folder`, by default in the home.

        Raises: OSError, InputError.
        """
        root = folder or self._home.projects_dir / validate_project_hash(project_hash)
        path = self._folder / f"{project_hash}.zip"
        async with self._locks.setdefault(project_hash, asyncio.Lock()):
            if project_hash not in self._digests or not path.is_file():
                self._digests[project_hash] = await asyncio.to_thread(_create, root, path)
            return path, self._digests[project_hash]

    def keep_only(self, hashes: set[str]) -> None:
        """Delete the archives of all other projects."""
        for path in self._folder.glob("*.zip"):
            if path.stem not in hashes:
                path.unlink(missing_ok=True)
        for project_hash in [name for name, lock in self._locks.items() if name not in hashes and not lock.locked()]:
            del self._locks[project_hash]
            self._digests.pop(project_hash, None)


def _create(root: Path, path: Path) -> str:
    if not root.is_dir():
        raise InputError("it is not on the operator's machine; deploy it again")
    names = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
    data = pack(ProjectFiles(root, tuple(names)))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.rename(path)
    return archive_hash(data)
