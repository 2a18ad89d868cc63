"""Desired state of each API: its newest revision, the last revision that served, and its number of replicas.

Only the operator's event loop calls the store, synchronously: a write takes about a millisecond, and no user's request
waits for one. While a database server is unreachable, writes fail, the first one after `WRITE_S`, and reads return the
cached records.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, func, insert, select, update

from cortex.config.schema import Api
from cortex.errors import DatabaseUnavailableError
from cortex.state.database import reading
from cortex.state.postgresql import DEADLINE
from cortex.state.queries import history
from cortex.state.queries.history import HistoryEntry
from cortex.state.revision import Revision
from cortex.state.tables import api_history, api_versions, apis, serving_revisions

#: Milliseconds from which an api_id counts down, so that the newest sorts first (the year 2286).
_TIME_ID_ORIGIN_MS = 10_000_000_000_000

#: Deadline of a transaction.
WRITE_S = 3.0


@dataclass(frozen=True)
class StoredFailure:
    """Reason why the newest revision did not become ready at the last attempt."""

    message: str
    traceback: str = ""


@dataclass(frozen=True)
class ApiRecord:
    """Desired state of one API."""

    name: str
    kind: str
    deployment: str | None
    target: Revision  #: the newest revision
    nonce: str  #: part of the revision; `refresh` changes it
    spec_id: str
    api_id: str
    created_at: datetime
    updated_at: datetime
    serving: Revision | None = None  #: the last revision that became ready
    failure: StoredFailure | None = None
    replicas: int | None = None  #: desired number within the spec's bounds; None: that of a new API
    number: int = 0  #: of the newest entry of its history
    live_number: int | None = None  #: of the newest entry that became ready

    @property
    def spec(self) -> Api:
        """The newest spec."""
        return self.target.spec

    @property
    def revision(self) -> str:
        """The newest revision."""
        return self.target.hash

    @property
    def revisions(self) -> list[Revision]:
        """The newest revision, and the one that serves, which may be the same; without it if none does."""
        return [self.target] if self.serving is None else [self.target, self.serving]


@dataclass(frozen=True)
class ApiVersion:
    """One deployed version of an API."""

    api_id: str
    deployed_at: datetime


@dataclass(frozen=True)
class ApiChange:
    """An API to create or to update."""

    target: Revision
    nonce: str
    spec_id: str
    action: str = "deploy"  #: what the history calls it
    by: str = ""  #: who requested it; empty: unknown
    differences: tuple[str, ...] = ()  #: from the revision that is live
    is_restart: bool = False  #: only the nonce changes: no new entry of the history


class ApiStore:
    """Stored APIs. `now` is the clock, injected for tests.

    Records are cached until the next write: the reconciler reads them each second, and nobody else writes.
    """

    def __init__(self, engine: Engine, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._engine = engine.execution_options(**{DEADLINE: WRITE_S})
        self._reading = reading(self._engine)
        self._now = now
        self._known: dict[str, ApiRecord] | None = None
        self._versions: dict[str, list[ApiVersion]] = {}
        self._history_projects: frozenset[str] = frozenset()
        self._is_stale = False

    def records(self) -> Sequence[ApiRecord]:
        """Return every API, sorted by name."""
        return tuple(self._load().values())

    def get(self, name: str) -> ApiRecord | None:
        """Return one API, or None."""
        return self._load().get(name)

    def versions(self, name: str) -> Sequence[ApiVersion]:
        """Return every version of an API, the newest first."""
        self._load()
        return self._versions.get(name, ())

    def history(self, name: str) -> list[HistoryEntry]:
        """Return the history of an API, the newest entry first."""
        with self._reading.connect() as connection:
            return history.entries(connection, name)

    def history_projects(self) -> frozenset[str]:
        """Return the hashes of the projects that entries of histories refer to."""
        self._load()
        return self._history_projects

    def write(self, changes: Sequence[ApiChange], deletions: Sequence[str] = (), keep_versions: bool = True) -> None:
        """Store `changes` and delete the APIs named in `deletions`, all or nothing."""
        with self._writing() as connection:
            for name in deletions:
                connection.execute(delete(apis).where(apis.c.name == name))
                if not keep_versions:
                    connection.execute(delete(api_versions).where(api_versions.c.api == name))
            for change in changes:
                self._store(connection, change)

    def mark_serving(self, name: str, revision: Revision) -> None:
        """Record that `revision` became ready and clear its failure; ignored if the API was deleted."""
        with self._writing() as connection:
            if connection.execute(select(apis.c.name).where(apis.c.name == name)).one_or_none() is None:
                return
            values = _revision_values(revision)
            matched = connection.execute(
                update(serving_revisions).where(serving_revisions.c.api == name).values(**values)
            ).rowcount
            if not matched:
                connection.execute(insert(serving_revisions).values(api=name, **values))
            connection.execute(
                update(apis)
                .where(apis.c.name == name, apis.c.revision == revision.hash)
                .values(failure_message=None, failure_traceback=None)
            )
            history.mark_live(connection, name, revision.hash, self._now().timestamp())

    def mark_failed(self, name: str, revision: str, failure: StoredFailure) -> None:
        """Record why `revision` can't become ready; ignored if there is a newer revision."""
        with self._writing() as connection:
            connection.execute(
                update(apis)
                .where(apis.c.name == name, apis.c.revision == revision)
                .values(failure_message=failure.message, failure_traceback=failure.traceback)
            )

    def set_replicas(self, name: str, replicas: int) -> None:
        """Record the desired number of replicas; ignored if the API was deleted."""
        with self._writing() as connection:
            connection.execute(update(apis).where(apis.c.name == name).values(replicas=replicas))

    def _load(self) -> dict[str, ApiRecord]:
        if self._known is None or self._is_stale:
            try:
                with self._reading.connect() as connection:
                    rows = connection.execute(_SELECT.order_by(apis.c.name))
                    known = {row.name: _record(row) for row in rows}
                    versions = connection.execute(select(api_versions).order_by(api_versions.c.api_id)).all()
                    projects = history.project_hashes(connection)
            except DatabaseUnavailableError:
                if self._known is None:
                    raise
            else:
                self._known, self._versions, self._history_projects, self._is_stale = known, {}, projects, False
                for row in versions:
                    version = ApiVersion(row.api_id, _datetime(row.deployed_at))
                    self._versions.setdefault(row.api, []).append(version)
        return self._known

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        self._is_stale = True  # even if the transaction fails: its commit may have happened
        with self._engine.begin() as connection:
            yield connection

    def _store(self, connection: Connection, change: ApiChange) -> None:
        spec, now = change.target.spec, self._now()
        columns = select(apis.c.revision, apis.c.created_at)
        before = connection.execute(columns.where(apis.c.name == spec.name)).one_or_none()
        api_id = f"{_time_id(now)}-{change.target.hash[:8]}-{change.spec_id[:8]}"
        revision = _revision_values(change.target)
        values: dict[str, Any] = {
            **revision,
            "kind": spec.kind,
            "deployment": spec.deployment,
            "nonce": change.nonce,
            "spec_id": change.spec_id,
            "api_id": api_id,
            "updated_at": now.timestamp(),
        }
        if before is None:
            connection.execute(insert(apis).values(name=spec.name, created_at=now.timestamp(), **values))
        else:
            if before.revision != change.target.hash:
                values |= {"failure_message": None, "failure_traceback": None}
            connection.execute(update(apis).where(apis.c.name == spec.name).values(**values))
        # Versions since the API's creation belong to it, also if the clock was set back since.
        deployed_at = now.timestamp() if before is None else max(now.timestamp(), before.created_at)
        connection.execute(insert(api_versions).values(api_id=api_id, api=spec.name, deployed_at=deployed_at))
        if change.is_restart:
            history.restart(connection, spec.name, revision, change.nonce, api_id)
        else:
            history.append(
                connection,
                spec.name,
                revision,
                nonce=change.nonce,
                api_id=api_id,
                action=change.action,
                by=change.by,
                changes=change.differences,
                now_s=now.timestamp(),
            )


def revision_prefixes(connection: Connection, name: str) -> frozenset[str]:
    """Return the first 8 characters of each revision of an API, without those of a deleted API of the same name.

    Two APIs never share a revision, because each new API has another nonce.
    """
    began = select(apis.c.created_at).where(apis.c.name == name).scalar_subquery()
    query = select(api_versions.c.api_id).where(api_versions.c.api == name, api_versions.c.deployed_at >= began)
    return frozenset(api_id.split("-")[1] for api_id in connection.execute(query).scalars())


_NUMBERS = select(func.max(api_history.c.number)).where(api_history.c.api == apis.c.name)
_SELECT = select(
    apis,
    _NUMBERS.scalar_subquery().label("number"),
    _NUMBERS.where(api_history.c.live_at.is_not(None)).scalar_subquery().label("live_number"),
    serving_revisions.c.revision.label("serving_revision"),
    serving_revisions.c.spec.label("serving_spec"),
    serving_revisions.c.project_hash.label("serving_project_hash"),
).select_from(apis.outerjoin(serving_revisions, serving_revisions.c.api == apis.c.name))


def _time_id(now: datetime) -> str:
    # The random digits make ids unique within one millisecond; they are primary keys.
    return f"{_TIME_ID_ORIGIN_MS - int(now.timestamp() * 1000):013x}{secrets.token_hex(2)}"


def _revision_values(revision: Revision) -> dict[str, str]:
    spec = revision.spec.model_dump_json()
    # A spec that can't be read back would make every later read of all APIs fail.
    Api.read_stored(spec)
    return {"revision": revision.hash, "spec": spec, "project_hash": revision.project_hash}


def _record(row: Row[Any]) -> ApiRecord:
    serving = None
    if row.serving_revision is not None:
        spec = Api.read_stored(row.serving_spec)
        serving = Revision(row.serving_revision, spec, row.serving_project_hash)
    failure = None
    if row.failure_message is not None:
        failure = StoredFailure(row.failure_message, row.failure_traceback or "")
    return ApiRecord(
        name=row.name,
        kind=row.kind,
        deployment=row.deployment,
        target=Revision(row.revision, Api.read_stored(row.spec), row.project_hash),
        nonce=row.nonce,
        spec_id=row.spec_id,
        api_id=row.api_id,
        created_at=_datetime(row.created_at),
        updated_at=_datetime(row.updated_at),
        serving=serving,
        failure=failure,
        replicas=row.replicas,
        number=row.number or 0,
        live_number=row.live_number,
    )


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
