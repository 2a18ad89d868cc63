"""Archives of projects for nodes, each made once, when the first node asks for it."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from cortex.config.archive import archive_hash
from cortex.config.project import ProjectFiles, pack
from cortex.errors import InputError
from cortex.home import Home

_HASH = re.compile(r"[0-9a-f]{64}")


def checked_hash(project_hash: str) -> str:
    """Return what names a folder of projects. Raises: InputError for what leads elsewhere."""
    if not _HASH.fullmatch(project_hash):
        raise InputError(f"{project_hash!r} is not the hash of a project")
    return project_hash


class Archives:
    """Files in a folder of the operator's home that is nobody else's."""

    def __init__(self, home: Home, name: str = "archives") -> None:
        self._home = home
        self._folder = home.run_dir / name
        self._locks: dict[str, asyncio.Lock] = {}
        self._digests: dict[str, str] = {}

    async def get(self, project_hash: str, folder: Path | None = None) -> tuple[Path, str]:
        """Return the file of a project, which is in its folder or in `folder`, and the digest of what is in it.

        Raises: OSError, InputError.
        """
        root = folder or self._home.projects_dir / checked_hash(project_hash)
        path = self._folder / f"{project_hash}.zip"
        async with self._locks.setdefault(project_hash, asyncio.Lock()):
            if project_hash not in self._digests or not path.is_file():
                self._digests[project_hash] = await asyncio.to_thread(_make, root, path)
            return path, self._digests[project_hash]

    def keep_only(self, hashes: set[str]) -> None:
        """Remove the archives of all other projects."""
        for path in self._folder.glob("*.zip"):
            if path.stem not in hashes:
                path.unlink(missing_ok=True)
        for project_hash in [name for name, lock in self._locks.items() if name not in hashes and not lock.locked()]:
            del self._locks[project_hash]
            self._digests.pop(project_hash, None)


def _make(root: Path, path: Path) -> str:
    if not root.is_dir():
        raise InputError("it is not on the operator's machine; deploy it again")
    names = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
    data = pack(ProjectFiles(root, tuple(names)))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.rename(path)
    return archive_hash(data)
