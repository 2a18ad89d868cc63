"""History of each API: what was deployed, when, by whom, and whether it ever became live.

Entries are numbered from 1 per API, and each can be deployed again. The functions run inside the transactions of
`ApiStore`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from cortex.config.schema import Api
from cortex.state.tables import api_history, serving_revisions

#: Entries kept per API, besides the newest one that was live: projects of entries stay on disk.
KEPT_ENTRIES = 10
#: `HistoryEntry.deployed_by` of what cortex deploys by itself: new versions of models, and rollbacks of canaries.
BY_CANARY = "canary"


@dataclass(frozen=True)
class HistoryEntry:
    """One change of an API."""

    number: int
    revision: str
    spec: Api
    project_hash: str
    nonce: str  #: part of the revision; `refresh` changes it
    api_id: str
    action: str  #: what created it: `deploy`, `patch`, `rollback to 3`; `upgrade` if it was deployed before histories
    deployed_at: datetime
    deployed_by: str  #: empty: unknown
    changes: tuple[str, ...]  #: differences from the entry that was live then
    live_at: datetime | None  #: when it first became ready; None: never

    @property
    def ends_canary(self) -> bool:
        """Return whether it is the rollback by which cortex itself ended the trial of the entry before."""
        return self.deployed_by == BY_CANARY and self.action.startswith("rollback to ")


def entries(connection: Connection, name: str) -> list[HistoryEntry]:
    """Return the history of an API, the newest entry first."""
    query = select(api_history).where(api_history.c.api == name).order_by(api_history.c.number.desc())
    return [
        HistoryEntry(
            number=row.number,
            revision=row.revision,
            spec=Api.read_stored(row.spec),
            project_hash=row.project_hash,
            nonce=row.nonce,
            api_id=row.api_id,
            action=row.action,
            deployed_at=datetime.fromtimestamp(row.deployed_at, UTC),
            deployed_by=row.deployed_by or "",
            changes=tuple(json.loads(row.changes)),
            live_at=datetime.fromtimestamp(row.live_at, UTC) if row.live_at is not None else None,
        )
        for row in connection.execute(query)
    ]


def project_hashes(connection: Connection) -> frozenset[str]:
    """Return the projects that the histories of all APIs need."""
    return frozenset(connection.execute(select(api_history.c.project_hash).distinct()).scalars())


def append(
    connection: Connection,
    name: str,
    target: dict[str, str],
    nonce: str,
    api_id: str,
    action: str,
    by: str,
    changes: Sequence[str],
    now_s: float,
) -> None:
    """Add an entry, and delete those that are too old. `target` has the columns of a revision.

    The entry is live at once if it equals what serves now: a rollback of a revision that never became live.
    """
    newest = select(func.max(api_history.c.number)).where(api_history.c.api == name)
    number = (connection.execute(newest).scalar() or 0) + 1
    connection.execute(
        insert(api_history).values(
            api=name,
            number=number,
            nonce=nonce,
            api_id=api_id,
            action=action,
            deployed_at=now_s,
            deployed_by=by or None,
            changes=json.dumps(list(changes)),
            live_at=now_s if _is_serving(connection, name, target) else None,
            **target,
        )
    )
    last_live = select(func.max(api_history.c.number)).where(
        api_history.c.api == name, api_history.c.live_at.is_not(None)
    )
    connection.execute(
        delete(api_history).where(
            api_history.c.api == name,
            api_history.c.number <= number - KEPT_ENTRIES,
            api_history.c.number != func.coalesce(last_live.scalar_subquery(), 0),
        )
    )


def _is_serving(connection: Connection, name: str, target: dict[str, str]) -> bool:
    row = connection.execute(select(serving_revisions).where(serving_revisions.c.api == name)).one_or_none()
    if row is None or (row.revision, row.project_hash) != (target["revision"], target["project_hash"]):
        return False
    return Api.read_stored(row.spec) == Api.read_stored(target["spec"])


def restart(connection: Connection, name: str, target: dict[str, str], nonce: str, api_id: str) -> None:
    """Give the newest entry another revision of the same content."""
    newest = select(func.max(api_history.c.number)).where(api_history.c.api == name).scalar_subquery()
    where = and_(api_history.c.api == name, api_history.c.number == newest)
    connection.execute(update(api_history).where(where).values(nonce=nonce, api_id=api_id, **target))


def mark_live(connection: Connection, name: str, revision: str, now_s: float) -> None:
    """Record that a revision became ready; of several entries with it, the newest."""
    mine = and_(api_history.c.api == name, api_history.c.revision == revision)
    newest = select(func.max(api_history.c.number)).where(mine).scalar_subquery()
    where = and_(mine, api_history.c.number == newest, api_history.c.live_at.is_(None))
    connection.execute(update(api_history).where(where).values(live_at=now_s))
