"""Who of several operators with one PostgreSQL database leads: a lock that a session holds, and a row that tells.

The lock goes with its session: at once when the process ends, within `SESSION_S` when its machine vanishes or the
process stands still. Each leader has an epoch of its own, by which `fence.py` refuses what an earlier one still writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortex.state.circuit_breaker import DatabaseUnreachableError, Watchdog
from cortex.state.database import STATE_SCHEMA
from cortex.state.postgresql import PostgresqlServer, prepare_schema

if TYPE_CHECKING:
    import psycopg

#: How long a leader's session lasts of which nothing is heard.
SESSION_S = 7.0
#: How long a statement may take here.
ANSWER_S = 3.0

_LOCK = "hashtext('cortex'), hashtext('leader')"
#: Operators of every version read and write this table before they migrate anything: it can only grow.
_CREATE = f"""
CREATE TABLE IF NOT EXISTS {STATE_SCHEMA}.leader (
    id INTEGER PRIMARY KEY, epoch BIGINT NOT NULL, host TEXT NOT NULL, pid BIGINT NOT NULL,
    url TEXT NOT NULL, gateway_url TEXT NOT NULL, since DOUBLE PRECISION NOT NULL
)"""
_TAKE = f"""
INSERT INTO {STATE_SCHEMA}.leader AS before VALUES (1, 1, %s, %s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET epoch = before.epoch + 1, host = excluded.host, pid = excluded.pid,
    url = excluded.url, gateway_url = excluded.gateway_url, since = excluded.since
RETURNING epoch"""
_WHO = f"SELECT host, pid, url, gateway_url, since, epoch FROM {STATE_SCHEMA}.leader"
_END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"


@dataclass(frozen=True)
class LeaderRecord:
    """An operator that leads, or did last."""

    host: str
    pid: int
    url: str
    gateway_url: str
    since: float  #: UNIX seconds
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.url} (process {self.pid} on {self.host})"


class LeaderLock:
    """A database's one place for a leader. All methods block, for some seconds at most; one thread at a time."""

    def __init__(self, url: str, session_s: float = SESSION_S, answer_s: float = ANSWER_S) -> None:
        self._server = PostgresqlServer(url)
        self._session_ms = int(session_s * 1000)
        self._answer_s = answer_s
        self._watchdog = Watchdog(lambda: None)
        self._connection: psycopg.Connection[Any] | None = None
        self._has_lock = False  #: and its session lives, as far as is known
        self._session: tuple[Any, ...] = ()  #: of the last connection that had the lock

    def prepare(self) -> None:
        """Make what is needed in the database. Raises: DatabaseAddressError."""
        prepare_schema(self._server, STATE_SCHEMA, _CREATE)

    def take(self, me: LeaderRecord) -> int | None:
        """Take the seat and return the epoch; None where another has it. Raises: DatabaseAwayError."""
        if not self._lock():
            return None
        epoch: int = self._ask(_TAKE, me.host, me.pid, me.url, me.gateway_url, me.since)[0]
        return epoch

    def keep(self, epoch: int) -> bool:
        """Tell whether this one still leads; a session that broke is made anew. Raises: DatabaseAwayError."""
        has_lock = self._has_lock or self._lock()
        leader = self.who()
        if leader is None or leader.epoch != epoch:
            return False
        if not has_lock:
            self._ask(_END, *self._session)  # the server has not noticed yet that our connection broke
            raise DatabaseUnreachableError("the session that held the lock is still being ended")
        return True

    def who(self) -> LeaderRecord | None:
        """Return who leads, or did last. Raises: DatabaseAwayError."""
        row = self._ask(_WHO)
        return LeaderRecord(*row) if row else None

    def leave(self) -> None:
        """Give up the seat, or what was done to get it."""
        connection, self._connection, self._has_lock = self._connection, None, False
        if connection is not None:
            connection.close()

    def _lock(self) -> bool:
        if not self._ask(f"SELECT pg_try_advisory_lock({_LOCK})")[0]:
            return False
        self._ask(f"SELECT set_config('idle_session_timeout', '{self._session_ms}', false)")
        self._session = self._ask("SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        self._has_lock = True
        return True

    def _ask(self, statement: str, *values: object) -> Any:
        try:
            if self._connection is None:
                self._connection = self._server.connect()
            with self._watchdog.watching(self._connection.fileno(), self._answer_s):
                return self._connection.execute(statement, values or None).fetchone()
        except DatabaseUnreachableError:
            raise
        except Exception as error:
            self.leave()
            raise DatabaseUnreachableError(self._server.words(error)) from error
