"""Stored API keys: their hashes, and the APIs they give access to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Engine, delete, insert, select

from cortex.state.database import reading
from cortex.state.tables import api_keys


@dataclass(frozen=True)
class StoredKey:
    """One key; the key itself is not stored."""

    id: str
    name: str
    apis: tuple[str, ...]  #: sorted; empty: all
    digest: str  #: SHA-256 of the key in hexadecimal, lower case
    created_at: datetime


class KeyStore:
    """Stored API keys. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = reading(engine)

    def all(self) -> Sequence[StoredKey]:
        """Return every key, the oldest first."""
        query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
        with self._reading.connect() as connection:
            return [
                StoredKey(
                    row.id,
                    row.name,
                    tuple(json.loads(row.apis)),
                    row.digest,
                    datetime.fromtimestamp(row.created_at, UTC),
                )
                for row in connection.execute(query)
            ]

    def add(self, key: StoredKey) -> None:
        """Store a key. Raises: sqlalchemy.exc.IntegrityError if its id is taken."""
        row = {
            "id": key.id,
            "name": key.name,
            "apis": json.dumps(key.apis),
            "digest": key.digest,
            "created_at": key.created_at.timestamp(),
        }
        with self._engine.begin() as connection:
            connection.execute(insert(api_keys).values(row))

    def remove(self, key_id: str) -> bool:
        """Delete a key; return False if there is none with that id."""
        with self._engine.begin() as connection:
            return connection.execute(delete(api_keys).where(api_keys.c.id == key_id)).rowcount > 0
