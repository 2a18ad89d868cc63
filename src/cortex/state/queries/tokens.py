"""Stored operator tokens: their hashes, scopes and expiry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Engine, delete, insert, select

from cortex.lifecycle import TokenScope
from cortex.state.database import reading
from cortex.state.tables import operator_tokens


@dataclass(frozen=True)
class StoredToken:
    """One token; the token itself is not stored."""

    id: str
    name: str
    scope: TokenScope
    api: str | None  #: the only API that it permits to read or change; None: all
    digest: str  #: SHA-256 of the token in hexadecimal, lower case
    created_at: datetime
    expires_at: datetime | None


class TokenStore:
    """Stored operator tokens. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = reading(engine)

    def all(self) -> Sequence[StoredToken]:
        """Return every token, the oldest first."""
        query = select(operator_tokens).order_by(operator_tokens.c.created_at, operator_tokens.c.id)
        with self._reading.connect() as connection:
            return [
                StoredToken(
                    row.id,
                    row.name,
                    TokenScope(row.scope),
                    row.api,
                    row.digest,
                    datetime.fromtimestamp(row.created_at, UTC),
                    None if row.expires_at is None else datetime.fromtimestamp(row.expires_at, UTC),
                )
                for row in connection.execute(query)
            ]

    def add(self, token: StoredToken) -> None:
        """Store a token. Raises: sqlalchemy.exc.IntegrityError if its id or its name is taken."""
        row = {
            "id": token.id,
            "name": token.name,
            "scope": token.scope,
            "api": token.api,
            "digest": token.digest,
            "created_at": token.created_at.timestamp(),
            "expires_at": token.expires_at and token.expires_at.timestamp(),
        }
        with self._engine.begin() as connection:
            connection.execute(insert(operator_tokens).values(row))

    def remove(self, token_id: str) -> bool:
        """Delete a token; return False if there is none with that id."""
        with self._engine.begin() as connection:
            return connection.execute(delete(operator_tokens).where(operator_tokens.c.id == token_id)).rowcount > 0
