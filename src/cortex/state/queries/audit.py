"""The stored audit log: changes that clients of the operator requested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
    number: int = field(default=0, compare=False)  #: ascending; 0: not stored yet


@dataclass(frozen=True)
class AuditFilter:
    """Entries to return: those that match all of these; None matches any."""

    api: str | None = None
    since: datetime | None = None
    token: str | None = None
    action: str | None = None
    before: int | None = None  #: entries with a smaller number, for the next page


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
        for row in rows:
            del row["number"]
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

    def entries(self, wanted: AuditFilter = AuditFilter(), limit: int = 100) -> Sequence[AuditEntry]:  # noqa: B008
        """Return the latest `limit` entries that match, the newest first."""
        columns = audit_log.c
        query = select(audit_log).order_by(columns.number.desc()).limit(limit)
        equal = ((columns.api, wanted.api), (columns.token, wanted.token), (columns.action, wanted.action))
        for column, value in equal:
            if value is not None:
                query = query.where(column == value)
        if wanted.since is not None:
            query = query.where(columns.at >= wanted.since.timestamp())
        if wanted.before is not None:
            query = query.where(columns.number < wanted.before)
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
                    row.number,
                )
                for row in connection.execute(query)
            ]
