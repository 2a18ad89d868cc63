"""Engines for PostgreSQL; the only module that needs psycopg.

Each engine works in a schema of its own. A broken connection is replaced at its next use. A server that does not answer
raises DatabaseUnreachableError within some seconds, then at once (`circuit_breaker`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from cortex.errors import DatabaseAddressError, DatabaseUnavailableError, DatabaseUnreachableError
from cortex.state.circuit_breaker import CircuitBreaker, Watchdog

if TYPE_CHECKING:
    import psycopg

#: Timeouts of a new connection, and of the check that a pooled one is alive.
CONNECT_S, _PING_S = 3, 1.5
#: Execution option: the deadline of a transaction, including all waiting; and its default.
DEADLINE, _DEADLINE_S = "cortex_deadline_s", 30.0

#: Both sides detect a dead host within six seconds; libpq counts `tcp_user_timeout` in milliseconds.
_KEEPALIVES = {"keepalives": 1, "keepalives_idle": 3, "keepalives_interval": 1, "keepalives_count": 3}
_DEFAULTS = {**_KEEPALIVES, "tcp_user_timeout": 5000, "application_name": "cortex", "client_encoding": "utf8"}
_GRANT = "grant its user CREATE on the database"
_OLDEST = 140_000  #: the first version with `idle_session_timeout`

#: Settings of every session; those of a role or a database must not weaken the durability of acknowledged writes.
_SETTINGS = (
    "synchronous_commit = on",
    "tcp_keepalives_idle = 3",
    "tcp_keepalives_interval = 1",
    "tcp_keepalives_count = 3",
    "tcp_user_timeout = 6000",
    "idle_in_transaction_session_timeout = 60000",
    "client_min_messages = warning",
)


class PostgresqlServer:
    """Makes connections to the database at a URL. No message contains the URL's password."""

    def __init__(self, url: str) -> None:
        self._driver = _driver()
        try:
            given = {key: str(value) for key, value in self._driver.conninfo.conninfo_to_dict(url).items()}
        except self._driver.Error:  # its message may contain a part of the password
            raise DatabaseAddressError(
                "the URL of the database can't be read; it must look like "
                "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
                "with % and two hexadecimal digits in the place of each special character"
            ) from None
        self._arguments: dict[str, Any] = {**_DEFAULTS, **given, "connect_timeout": CONNECT_S, "autocommit": True}
        self._arguments["target_session_attrs"] = "read-write"  # selects the primary among several hosts
        user, host, port = (given.get(name, "") for name in ("user", "host", "port"))
        self.place = f"postgresql://{user and user + '@'}{host}{port and ':' + port}/{given.get('dbname', '')}"

    def connect(self) -> psycopg.Connection[Any]:
        """Connect to a server that accepts writes. Raises: DatabaseUnreachableError."""
        try:
            connection: psycopg.Connection[Any] = self._driver.connect(**self._arguments)
            connection.execute("".join(f"SET {setting};" for setting in _SETTINGS))
        except (self._driver.Error, OSError) as error:
            raise DatabaseUnreachableError(self.message(error, "can't be reached")) from error
        return connection

    def message(self, error: BaseException, what: str = "can't be used now") -> str:
        """Return a message of one line for a database error."""
        return f"the database {self.place} {what}: {' '.join(str(error).split())}"

    def is_transient(self, error: BaseException) -> bool:
        """Return True for an error of the server or the connection, False for one of the statement."""
        driver = self._driver
        return isinstance(error, driver.OperationalError | driver.InterfaceError | driver.errors.ReadOnlySqlTransaction)


def shown(url: str) -> str:
    """Return a database's URL without secrets. Raises: DatabaseAddressError."""
    return PostgresqlServer(url).place


def postgresql_engine(url: str, schema: str) -> Engine:
    """Return an engine that works in a schema, which is created. Raises: DatabaseAddressError."""
    server = PostgresqlServer(url)
    prepare_schema(server, schema)
    breaker = CircuitBreaker(lambda: server.connect().close())
    watchdog = Watchdog(lambda: breaker.trip(f"the database {server.place} can't be used now: it does not answer"))

    def connect() -> psycopg.Connection[Any]:
        breaker.check()
        try:
            connection = server.connect()
        except DatabaseUnreachableError as error:
            breaker.trip(str(error))
            raise
        connection.execute(f"SET search_path = {schema}")
        connection.autocommit = False
        return connection

    # The real URL is only in `connect`, so that no representation of the engine contains it.
    engine = create_engine("postgresql+psycopg://", creator=connect, pool_size=8, isolation_level="READ COMMITTED")
    _enforce_deadlines(engine, watchdog)

    def convert_error(context: ExceptionContext) -> BaseException | None:
        error = context.original_exception
        if context.is_disconnect:
            return DatabaseUnreachableError(server.message(error))
        return DatabaseUnavailableError(server.message(error)) if server.is_transient(error) else None

    event.listen(engine, "handle_error", convert_error, retval=True)
    event.listen(engine, "engine_disposed", lambda _: breaker.shutdown())
    return engine


def _driver() -> Any:
    try:
        import psycopg  # noqa: PLC0415 - an extra
        import psycopg.conninfo  # noqa: PLC0415
    except ImportError as error:
        raise DatabaseAddressError(
            f"PostgreSQL needs more packages ({error}); install cortex-serving[postgresql]"
        ) from error
    return psycopg


def check_database(url: str, schemas: Sequence[str]) -> None:
    """Check that an operator can use the database at a URL, without changing it. Raises: DatabaseAddressError."""
    server = PostgresqlServer(url)
    with _connect_checked(server) as connection:
        missing = "SELECT 1 FROM unnest(%s::text[]) AS name WHERE name NOT IN (SELECT nspname FROM pg_namespace)"
        may_create = "SELECT has_database_privilege(current_database(), 'CREATE')"
        if connection.execute(missing, (list(schemas),)).fetchone() and connection.execute(may_create).fetchone() != (
            True,
        ):
            raise DatabaseAddressError(f"the database {server.place} can't be set up; {_GRANT}")


def prepare_schema(server: PostgresqlServer, schema: str, *statements: str) -> None:
    """Check the database, create the schema, and run `statements`, all while no other operator does so.

    Raises: DatabaseAddressError.
    """
    with _connect_checked(server) as connection:
        try:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(hashtext('cortex'), hashtext(%s))", (schema,))
                known = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone()
                if known is None:
                    connection.execute(f"CREATE SCHEMA {schema}")
                for statement in statements:
                    connection.execute(statement)
        except server._driver.Error as error:
            message = server.message(error, "can't be set up")
            raise DatabaseAddressError(f"{message}; {_GRANT}") from error


@contextlib.contextmanager
def _connect_checked(server: PostgresqlServer) -> Iterator[psycopg.Connection[Any]]:
    """Connect to a server that cortex supports. Raises: DatabaseAddressError."""
    try:
        connection = server.connect()
    except DatabaseUnreachableError as error:
        raise DatabaseAddressError(f"{error}; check the database's URL, and that it runs") from error
    with connection:
        if connection.info.server_version < _OLDEST:
            raise DatabaseAddressError(f"the database {server.place} is of a PostgreSQL older than {_OLDEST // 10_000}")
        encoding = connection.execute("SHOW server_encoding").fetchone()
        if encoding != ("UTF8",):
            raise DatabaseAddressError(
                f"the database {server.place} has the encoding {encoding and encoding[0]}; make one with UTF8"
            )
        yield connection


def _enforce_deadlines(engine: Engine, watchdog: Watchdog) -> None:
    """End transactions at their deadline, and check a pooled connection before its use.

    `pool_pre_ping` is not enough here: its ping has no timeout of its own.
    """

    def check_out(connection: psycopg.Connection[Any], entry: ConnectionPoolEntry, _: Any) -> None:
        if "cortex_used" not in entry.info:  # new
            entry.info["cortex_used"] = True
            return
        try:
            with watchdog.watching(connection.fileno(), _PING_S):
                connection.autocommit = True  # without a BEGIN, the ping is one round trip
                connection.execute("")
                connection.autocommit = False
        except Exception as error:
            raise DisconnectionError(str(error)) from error  # the pool opens another connection

    def begin(connection: Connection) -> None:
        seconds = connection.get_execution_options().get(DEADLINE, _DEADLINE_S)
        driver: Any = connection.connection.dbapi_connection
        watchdog.watch(id(driver), driver.fileno(), seconds)

    def check_in(connection: psycopg.Connection[Any] | None, _: ConnectionPoolEntry) -> None:
        if connection is not None:
            watchdog.unwatch(id(connection))

    event.listen(engine, "checkout", check_out)
    event.listen(engine, "begin", begin)
    event.listen(engine, "checkin", check_in)
    event.listen(engine, "close", lambda connection, _: watchdog.unwatch(id(connection)))
    event.listen(engine, "close_detached", lambda connection: watchdog.unwatch(id(connection)))
