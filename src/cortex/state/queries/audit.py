"""The stored audit log: changes that clients of the operator requested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from sqlalchemy import Engine, delete, func, insert, select

from cortex.lifecycle import AuditResult
from cortex.state.database import reading
from cortex.state.tables import audit_log

#: Entries that are kept of each action. Those of clients without a valid token are counted separately, so that nobody
#: can flush out the others.
MAX_ENTRIES = 10_000
#: Older entries are deleted when so many were added.
_ENTRIES_PER_CLEANUP = 1_000


@dataclass(frozen=True)
class AuditEntry:
    """One change that a client requested."""

    at: datetime
    token: str | None  #: name of the client's token; None: it had no valid one
    address: str  #: of the client
    action: str
    api: str | None  #: None: the change concerns no API
    result: AuditResult
    detail: str  #: what exactly, or why not


class AuditStore:
    """The audit log in the database. Thread-safe."""

    def __init__(
        self, engine: Engine, max_entries: int = MAX_ENTRIES, entries_per_cleanup: int = _ENTRIES_PER_CLEANUP
    ) -> None:
        self._engine = engine
        self._reading = reading(engine)
        self._max_entries = max_entries
        self._entries_per_cleanup = entries_per_cleanup
        self._added = 0

    def add(self, entries: Sequence[AuditEntry]) -> None:
        """Append entries, and delete old ones from time to time."""
        rows = [asdict(entry) | {"at": entry.at.timestamp()} for entry in entries]
        with self._engine.begin() as connection:
            connection.execute(insert(audit_log), rows)
            if self._added % self._entries_per_cleanup + len(rows) >= self._entries_per_cleanup or self._added == 0:
                columns = audit_log.c
                age = func.row_number().over(
                    partition_by=[columns.action, columns.token.is_(None)], order_by=columns.number.desc()
                )
                numbered = select(columns.number, age.label("age")).subquery()
                old = select(numbered.c.number).where(numbered.c.age > self._max_entries)
                connection.execute(delete(audit_log).where(columns.number.in_(old)))
        self._added += len(rows)

    def entries(self, api: str | None = None, since: datetime | None = None, limit: int = 100) -> Sequence[AuditEntry]:
        """Return the latest entries, the newest first; with `api` those of one API, with `since` those from then on."""
        query = select(audit_log).order_by(audit_log.c.number.desc()).limit(limit)
        if api is not None:
            query = query.where(audit_log.c.api == api)
        if since is not None:
            query = query.where(audit_log.c.at >= since.timestamp())
        with self._reading.connect() as connection:
            return [
                AuditEntry(
                    datetime.fromtimestamp(row.at, UTC),
                    row.token,
                    row.address,
                    row.action,
                    row.api,
                    AuditResult(row.result),
                    row.detail,
                )
                for row in connection.execute(query)
            ]
