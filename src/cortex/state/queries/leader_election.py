"""Leader election among operators that share a PostgreSQL database: an advisory lock, and a row with the leader.

    standby ── acquire: the lock is free, epoch + 1 ──> leader ── confirm ──> leader
       ^                                                  │
       └── its session ended, or another has the epoch ───┘

The lock is released with its session: at once when the process ends, within `SESSION_S` when its machine is lost or the
process is stopped. Each leader has a new epoch, and `fencing` rejects writes of earlier epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortex.errors import DatabaseUnreachableError
from cortex.state.circuit_breaker import Watchdog
from cortex.state.database import STATE_SCHEMA
from cortex.state.postgresql import PostgresqlServer, prepare_schema

if TYPE_CHECKING:
    import psycopg

#: Time after which the server ends an idle session of the leader.
SESSION_S = 7.0
#: Deadline of a statement.
ANSWER_S = 3.0

_LOCK = "hashtext('cortex'), hashtext('leader')"
#: Operators of every version use this table before they migrate anything, so columns can only be added.
_CREATE = f"""
CREATE TABLE IF NOT EXISTS {STATE_SCHEMA}.leader (
    id INTEGER PRIMARY KEY, epoch BIGINT NOT NULL, host TEXT NOT NULL, pid BIGINT NOT NULL,
    url TEXT NOT NULL, gateway_url TEXT NOT NULL, since DOUBLE PRECISION NOT NULL
)"""
_BECOME_LEADER = f"""
INSERT INTO {STATE_SCHEMA}.leader AS before VALUES (1, 1, %s, %s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET epoch = before.epoch + 1, host = excluded.host, pid = excluded.pid,
    url = excluded.url, gateway_url = excluded.gateway_url, since = excluded.since
RETURNING epoch"""
_LEADER = f"SELECT host, pid, url, gateway_url, since, epoch FROM {STATE_SCHEMA}.leader"
_TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"


@dataclass(frozen=True)
class LeaderRecord:
    """The operator that is the leader, or was the last one."""

    host: str
    pid: int
    url: str
    gateway_url: str
    since: float  #: UNIX seconds
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.url} (process {self.pid} on {self.host})"


class LeaderLock:
    """The leader lock of a database. Methods block for some seconds at most; only one thread may call them."""

    def __init__(self, url: str, session_s: float = SESSION_S, answer_s: float = ANSWER_S) -> None:
        self._server = PostgresqlServer(url)
        self._session_ms = int(session_s * 1000)
        self._answer_s = answer_s
        self._watchdog = Watchdog(lambda: None)
        self._connection: psycopg.Connection[Any] | None = None
        self._has_lock = False  #: and its session is not known to be broken
        self._session: tuple[Any, ...] = ()  #: the server process of the last connection that had the lock

    def prepare(self) -> None:
        """Create the schema and the table. Raises: DatabaseAddressError."""
        prepare_schema(self._server, STATE_SCHEMA, _CREATE)

    def acquire(self, me: LeaderRecord) -> int | None:
        """Become the leader and return the epoch; None if another operator leads. Raises: DatabaseUnreachableError."""
        if not self._lock():
            return None
        epoch: int = self._fetch(_BECOME_LEADER, me.host, me.pid, me.url, me.gateway_url, me.since)[0]
        return epoch

    def confirm(self, epoch: int) -> bool:
        """Return True if this operator still leads; replaces a broken session. Raises: DatabaseUnreachableError."""
        has_lock = self._has_lock or self._lock()
        leader = self.leader()
        if leader is None or leader.epoch != epoch:
            return False
        if not has_lock:
            self._fetch(_TERMINATE, *self._session)  # the server has not detected yet that the connection broke
            raise DatabaseUnreachableError("the session that held the lock is still being terminated")
        return True

    def leader(self) -> LeaderRecord | None:
        """Return the leader, or the last one; None if there never was one. Raises: DatabaseUnreachableError."""
        row = self._fetch(_LEADER)
        return LeaderRecord(*row) if row else None

    def release(self) -> None:
        """Release the lock and close the connection."""
        connection, self._connection, self._has_lock = self._connection, None, False
        if connection is not None:
            connection.close()

    def _lock(self) -> bool:
        if not self._fetch(f"SELECT pg_try_advisory_lock({_LOCK})")[0]:
            return False
        self._fetch(f"SELECT set_config('idle_session_timeout', '{self._session_ms}', false)")
        self._session = self._fetch("SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        self._has_lock = True
        return True

    def _fetch(self, statement: str, *values: object) -> Any:
        try:
            if self._connection is None:
                self._connection = self._server.connect()
            with self._watchdog.watching(self._connection.fileno(), self._answer_s):
                return self._connection.execute(statement, values or None).fetchone()
        except DatabaseUnreachableError:
            raise
        except Exception as error:
            self.release()
            raise DatabaseUnreachableError(self._server.message(error)) from error
