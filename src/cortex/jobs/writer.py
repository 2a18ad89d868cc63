"""Group commit: a thread with one connection runs all waiting operations in one transaction, with one disk flush.

If the connection to a server breaks:

    before the commit was sent   nothing was stored: the transaction runs again on a new connection, for `PATIENCE_S`
                                 from the beginning of an outage, and once after that
    during the commit            the outcome is unknown: the fence (`state/fencing.py`), in which the transaction left a
                                 token, is queried once the server answers; an uncommitted transaction runs again

So an operation may run more than once, with one run kept: its effects outside of the database must tolerate that. If
the server stays unreachable or another operator becomes the leader, callers get DatabaseUnavailableError and do not
know the outcome. They can recover: a report names its lease, a lease whose reply was lost ends at the next renewal,
scheduled runs and status changes are idempotent. A submission that is sent again may create a second job, as after
any lost response.
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

from cortex.errors import DatabaseUnreachableError
from cortex.state.fencing import token_of, was_committed

T = TypeVar("T")

#: Maximum number of operations in one transaction: the first of them waits for the last.
MAX_GROUP = 64

#: From the beginning of an outage: time for which transactions are repeated, and an unknown outcome is queried.
PATIENCE_S, DOUBT_S = 3.0, 10.0
_PAUSE_S = 0.05


@dataclass
class _Transaction:
    """Progress of a transaction."""

    outcomes: list[_Outcome] = field(default_factory=list)
    token: str | None = None  #: set before the commit is sent, if there is a fence


@dataclass(frozen=True)
class _Operation(Generic[T]):
    """A function to run, and the future of its caller."""

    work: Callable[[Connection], T]
    future: asyncio.Future[T]


@dataclass(frozen=True)
class _Outcome:
    """Result or exception of an operation."""

    future: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None

    def resolve(self) -> None:
        """Resolve the caller's future; called on the event loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class TransactionThread:
    """Runs operations on a thread of its own, in the order of their submission.

    All methods belong to one event loop. An operation that raises is rolled back without an effect on the others in
    its transaction. An awaited operation is on the disk.
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
        """Run the waiting operations, then end the thread."""
        if self._is_open:
            self._is_open = False
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction and return its result once the transaction is committed.

        Cancelling has an effect only before the operation begins.
        """
        if not self._is_open:
            raise RuntimeError("the transaction thread is not running")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(_Operation(work, future))
        return await future

    def _run(self) -> None:
        while True:
            group, is_last = self._next_group()
            if group:
                outcomes = self._commit(group)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    group[0].future.get_loop().call_soon_threadsafe(_resolve_all, outcomes)
            if is_last:
                return

    def _next_group(self) -> tuple[list[_Operation[Any]], bool]:
        """Wait for an operation; return it with all waiting ones, and True if the thread ends after them."""
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
        """Run a group in one transaction. If the transaction itself fails, all its operations fail."""
        try:
            while True:
                progress = _Transaction()
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
            return [_Outcome(operation.future, error=error) for operation in group]

    def _transact(self, group: list[_Operation[Any]], progress: _Transaction) -> list[_Outcome]:
        with self._engine.connect() as connection, connection.begin() as transaction:
            if len(group) == 1:  # needs no savepoint: an error rolls the transaction back
                progress.outcomes = [_Outcome(group[0].future, group[0].work(connection))]
            else:
                progress.outcomes = [_attempt(connection, operation) for operation in group]
            progress.token = token_of(connection)
            transaction.commit()
        return progress.outcomes

    def _was_committed(self, token: str) -> bool:
        """Return True if a commit happened. Raises: DatabaseUnavailableError if its outcome stays unknown."""
        while True:
            try:
                return was_committed(self._engine, token)
            except DatabaseUnreachableError as error:
                self._pause(error, DOUBT_S)

    def _pause(self, error: DatabaseUnreachableError, patience_s: float) -> None:
        """Wait before another attempt. Raises: `error` if the outage has lasted too long."""
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
        except Exception:  # the database aborted the whole transaction
            raise error from None
        outcome = _Outcome(operation.future, error=error)
    connection.exec_driver_sql("RELEASE SAVEPOINT operation")
    return outcome


def _resolve_all(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        outcome.resolve()
