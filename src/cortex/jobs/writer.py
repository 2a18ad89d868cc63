"""One thread that owns one connection: what waits for it together shares one transaction, and so one wait for the disk.

Knows nothing of what its operations do.

A connection to a server can break. Before the commit was sent, nothing of the transaction is left, and it is made
again on a new connection: for some seconds from the beginning of an outage, then each one is tried once. In the
middle of the commit it may have been made or not; the fence (`state/fencing.py`), where the transaction left a token,
is asked as soon as the server answers again, and only a transaction that was not made is made again. So an operation
may run more than once, of which one is kept: what it does outside of the database must bear that. Where the server
stays away, or another operator writes by then, callers get DatabaseUnavailableError and must look for themselves.
They can: reports name their lease, a lease that did not arrive ends at the next renewal, ticks and changes of status
are taken once. A submission that is sent again may be a second job, as after any answer that got lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from cortex.errors import DatabaseUnavailableError
from cortex.state.circuit_breaker import DatabaseUnreachableError
from cortex.state.fencing import token_of, was_committed

T = TypeVar("T")

#: Operations that share a transaction at most: the first of them waits for the last.
MAX_GROUP = 64

#: From the beginning of an outage on: how long transactions are made again, and how long it is asked whether one was.
PATIENCE_S, DOUBT_S = 3.0, 10.0
_PAUSE_S = 0.05


@dataclass
class _Progress:
    """How far a transaction is."""

    outcomes: list[_Outcome] = field(default_factory=list)
    token: str | None = None  #: once the commit is being sent, where there is a fence


@dataclass(frozen=True)
class _Operation(Generic[T]):
    """Something to do, and who waits for it."""

    work: Callable[[Connection], T]
    future: asyncio.Future[T]


@dataclass(frozen=True)
class _Outcome:
    """What an operation returned or raised."""

    future: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None

    def tell(self) -> None:
        """Wake who waits; on the event loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class TransactionThread:
    """Runs operations on a thread of its own, in the order in which they came.

    All methods belong to one event loop. An operation that raises leaves no trace in the database and does not hurt
    those that share its transaction. What was awaited is on the disk.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._queue: SimpleQueue[_Operation[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_open = False
        self._away_since: float | None = None

    def startup(self) -> None:
        """Start the thread."""
        self._is_open = True
        self._thread.start()

    async def shutdown(self) -> None:
        """Finish what is waiting, then end the thread."""
        if self._is_open:
            self._is_open = False
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Do `work` in a transaction and return its result once that is committed.

        One that is cancelled before it began is left out; later it happens all the same.
        """
        if not self._is_open:
            raise RuntimeError("the writer does not run")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(_Operation(work, future))
        return await future

    def _run(self) -> None:
        while True:
            group, is_last = self._next_group()
            if group:
                outcomes = self._commit(group)
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                    group[0].future.get_loop().call_soon_threadsafe(_tell_all, outcomes)
            if is_last:
                return

    def _next_group(self) -> tuple[list[_Operation[Any]], bool]:
        """Wait for an operation; return it with all that wait behind it, and whether nothing follows them."""
        group: list[_Operation[Any]] = []
        operation = self._queue.get()
        while operation is not None:
            if not operation.future.cancelled():
                group.append(operation)
            if len(group) == MAX_GROUP:
                return group, False
            try:
                operation = self._queue.get_nowait()
            except Empty:
                return group, False
        return group, True

    def _commit(self, group: list[_Operation[Any]]) -> list[_Outcome]:
        """Run a group in one transaction. Where the transaction itself fails, all of it failed."""
        try:
            while True:
                progress = _Progress()
                try:
                    outcomes = self._transact(group, progress)
                except DatabaseUnreachableError as error:
                    if progress.token is None:
                        self._pause(error, PATIENCE_S)
                        continue
                    if not self._was_committed(progress.token):
                        continue
                    outcomes = progress.outcomes
                self._away_since = None
                return outcomes
        except Exception as error:
            return [_Outcome(operation.future, error=_named(error)) for operation in group]

    def _transact(self, group: list[_Operation[Any]], progress: _Progress) -> list[_Outcome]:
        with self._engine.connect() as connection, connection.begin() as transaction:
            if len(group) == 1:  # what it leaves if it raises goes with the transaction
                progress.outcomes = [_Outcome(group[0].future, group[0].work(connection))]
            else:
                progress.outcomes = [_attempt(connection, operation) for operation in group]
            progress.token = token_of(connection)
            transaction.commit()
        return progress.outcomes

    def _was_committed(self, token: str) -> bool:
        """Find out what became of a commit. Raises: DatabaseUnavailableError if that can't be known."""
        while True:
            try:
                return was_committed(self._engine, token)
            except DatabaseUnreachableError as error:
                self._pause(error, DOUBT_S)

    def _pause(self, error: DatabaseUnreachableError, patience_s: float) -> None:
        """Wait a moment before another attempt. Raises: `error` if the server has been away for too long."""
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since > patience_s:
            raise error
        time.sleep(_PAUSE_S)


def _attempt(connection: Connection, operation: _Operation[Any]) -> _Outcome:
    connection.exec_driver_sql("SAVEPOINT operation")
    try:
        outcome = _Outcome(operation.future, operation.work(connection))
    except Exception as error:
        try:
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT operation")
        except Exception:  # the database has given up the whole transaction
            raise error from None
        outcome = _Outcome(operation.future, error=_named(error))
    connection.exec_driver_sql("RELEASE SAVEPOINT operation")
    return outcome


def _named(error: Exception) -> Exception:
    """Say of a full disk and the like that it is not the operation's fault, and may pass."""
    if not isinstance(error, OperationalError):
        return error
    named = DatabaseUnavailableError(f"the database of jobs can't be used now: {error.orig}; free its disk or its lock")
    named.__cause__ = error
    return named


def _tell_all(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        outcome.tell()
