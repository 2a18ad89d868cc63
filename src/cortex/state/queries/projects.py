"""Archives of projects in the database, for operators on other machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from sqlalchemy import Engine, delete, insert, select

from cortex.state.database import reading
from cortex.state.tables import project_parts

_PART_BYTES = 1024 * 1024


class ProjectStore:
    """Stored project archives. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = reading(engine)

    def hashes(self) -> frozenset[str]:
        """Return the hashes of the stored projects."""
        with self._reading.connect() as connection:
            return frozenset(connection.execute(select(project_parts.c.hash).distinct()).scalars())

    def put(self, project_hash: str, archive: Path) -> None:
        """Store a project unless it is stored, all or nothing."""
        if project_hash in self.hashes():
            return
        with self._engine.begin() as connection, archive.open("rb") as file:
            connection.execute(delete(project_parts).where(project_parts.c.hash == project_hash))
            number = 0
            while data := file.read(_PART_BYTES):
                connection.execute(insert(project_parts).values(hash=project_hash, number=number, data=data))
                number += 1

    def get(self, project_hash: str) -> Iterator[bytes]:
        """Yield the parts of an archive; nothing if it is not stored."""
        query = select(project_parts.c.data).where(project_parts.c.hash == project_hash)
        with self._reading.connect() as connection:
            number = 0
            while (data := connection.execute(query.where(project_parts.c.number == number)).scalar()) is not None:
                yield data
                number += 1

    def keep_only(self, hashes: Collection[str]) -> None:
        """Delete all other projects."""
        unused = self.hashes() - set(hashes)
        if unused:
            with self._engine.begin() as connection:
                connection.execute(delete(project_parts).where(project_parts.c.hash.in_(unused)))
