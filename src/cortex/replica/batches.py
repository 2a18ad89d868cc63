"""One batch: the calls that it takes, and the outcome of each of its requests. It runs on any thread.

A call that fails is made again with each half of its requests, so that only the guilty ones fail: log2(n) times two
calls more for one of n. It knows nothing of when a batch begins.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from cortex.errors import UserError
from cortex.predictor.loader import BoundMethod, BoundPredictor, result_kind
from cortex.predictor.tracebacks import describe
from cortex.replica.calls import Arguments, Caller, Failed, Outcome
from cortex.replica.errors import write_log
from cortex.replica.http import Connection
from cortex.replica.request_log import REQUEST
from cortex.replica.spec import ReplicaSpec

T = TypeVar("T")

Told = list[tuple[Connection, Outcome]]


def batched_method(spec: ReplicaSpec, predictor: BoundPredictor) -> BoundMethod | None:
    """Return the method that gets batches; None where each request is a call of its own.

    Models of TensorFlow are run for several requests at once instead, whatever calls they come from.
    """
    method = predictor.methods.get("POST")
    return method if method is not None and spec.max_batch_size and spec.type == "python" else None


def for_one(method: BoundMethod) -> BoundMethod:
    """Return a method of batches as one of single requests."""

    def call(payload: Any, query_params: Any, headers: Any) -> Any:
        results = method.call([payload], [query_params], [headers])
        if type(results) is not list and result_kind(results) == "async":
            return _awaited(method.name, results)
        return _only(method.name, results)

    return replace(method, call=call)


async def _awaited(name: str, results: Awaitable[Any]) -> Any:
    return _only(name, await results)


def _only(name: str, results: Any) -> Any:
    check_result(name, 1, results)
    return results[0]


class WrongResult(UserError):
    """A batch's result can't be matched with its requests."""


class Parts(Generic[T]):
    """The calls that a batch takes: one with all of it, then one with each half of what failed."""

    def __init__(self, members: Sequence[T], isolates: bool) -> None:
        self._waiting = [list(members)]
        self._isolates = isolates

    def next(self) -> list[T] | None:
        """Return the members of the next call; None if there is none."""
        return self._waiting.pop() if self._waiting else None

    def split(self, part: list[T]) -> bool:
        """Learn that a call failed; False if that is the outcome of its members."""
        if len(part) < 2 or not self._isolates:
            return False
        middle = len(part) // 2
        self._waiting += [part[middle:], part[:middle]]
        return True


@dataclass(slots=True)
class Entry:
    """One request of a call."""

    connection: Connection
    arguments: Arguments


@dataclass(slots=True)
class Batch:
    """Requests that are answered together."""

    connections: list[Connection]
    deadline_ns: int  #: the earliest of theirs, monotonic
    began_ns: int
    parts: Parts[Connection]
    told: Told = field(default_factory=list)  #: outcomes that are known and have yet to be told
    calls: int = 0
    duration_ns: int = 0  #: of all calls so far


@dataclass(slots=True)
class Awaited:
    """A call of an `async def` method has begun; its result has to be awaited."""

    entries: list[Entry]
    value: Awaitable[Any]


class BatchCaller:
    """Makes the calls of batches of one method; threads may share it."""

    def __init__(self, caller: Caller, method: BoundMethod, timeout_s: Callable[[], float]) -> None:
        self.is_async = method.kind == "async"
        self._caller = caller
        self._method = method
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """Return the number of the next call, as the rows of its requests have it."""
        return next(self._numbers)

    def run(self, batch: Batch, tell: Callable[[Told], None]) -> Awaited | None:
        """Make the calls until one is to be awaited; what is not told between them stays in the batch. Never raises."""
        while (part := batch.parts.next()) is not None:
            if batch.calls:
                part = self._in_time(batch, part)
            entries = self._prepare(batch, part) if part else []
            if not entries:
                continue
            started_ns = time.monotonic_ns()
            try:
                result = self._invoke(entries)
                if type(result) is not list and result_kind(result) == "async":
                    return Awaited(entries, result)
                self.finish(batch, entries, result)
            except BaseException as error:  # the edge of the user's code
                self.fail(batch, entries, error)
            batch.duration_ns += time.monotonic_ns() - started_ns
            if batch.calls > 1 and batch.told:  # these need not wait for the rest
                told, batch.told = batch.told, []
                tell(told)
        return None

    def finish(self, batch: Batch, entries: list[Entry], result: Any) -> None:
        """Match a result with its requests. Raises: WrongResult."""
        check_result(self._method.name, len(entries), result)
        returned_ns = time.monotonic_ns()
        caller, method = self._caller, self._method
        for entry, one in zip(entries, result, strict=True):
            connection = entry.connection
            connection.returned_ns = returned_ns
            outcome: Outcome
            try:
                outcome = caller.answered(connection, method, one, entry.arguments)
            except BaseException as error:  # of this one alone
                outcome = caller.failed(connection, method.name, error)
            batch.told.append((connection, outcome))

    def fail(self, batch: Batch, entries: list[Entry], error: BaseException) -> None:
        """Have the halves called, or take the error for the outcome of all."""
        connections = [entry.connection for entry in entries]
        if batch.parts.split(connections):
            for connection in connections:
                connection.rejoin(0)
            if batch.calls == 1:
                size = len(connections)
                write_log(f"a batch of {size} requests failed, so its halves are called apart: {describe(error)}\n")
            return
        failed = self._caller.failed(connections[0], self._method.name, error)
        if len(connections) > 1:
            ids = ", ".join(connection.request_id.decode("latin-1") for connection in connections)
            write_log(f"that was a batch of {len(connections)} requests: {ids}\n")
        batch.told += [(connection, failed) for connection in connections]

    def give_up(self, batch: Batch, entries: list[Entry]) -> list[Connection]:
        """Take it that the time of the first is over; return those that have some left, whose call was ended too."""
        left = [entry.connection for entry in entries]
        while (part := batch.parts.next()) is not None:
            left += part
        return self._in_time(batch, left)

    def deadline_ns(self, connection: Connection) -> int:
        """Return when the time of a request is over, monotonic."""
        return connection.arrived_ns + int(self._timeout_s() * 1_000_000_000)

    def timed_out(self, when: str = "") -> Failed:
        """Return the outcome of a request whose time is over."""
        return Failed(504, f"timed out after {self._timeout_s():g} s{when}")

    def _in_time(self, batch: Batch, part: list[Connection]) -> list[Connection]:
        """Return those whose time is not over; the others are told so."""
        now_ns = time.monotonic_ns()
        late = [connection for connection in part if self.deadline_ns(connection) <= now_ns]
        batch.told += [(connection, self.timed_out()) for connection in late]
        return [connection for connection in part if connection not in late]

    def _prepare(self, batch: Batch, part: list[Connection]) -> list[Entry]:
        """Parse; anew for each call, as the user's code may have changed what it was given."""
        if batch.calls:
            number = self.next_number()
            for connection in part:
                connection.rejoin(number)
        batch.calls += 1
        entries = []
        for connection in part:
            try:
                entries.append(Entry(connection, self._caller.arguments(connection, self._method)))
            except BaseException as error:  # a body that is not what it says
                batch.told.append((connection, self._caller.failed(connection, self._method.name, error)))
        return entries

    def _invoke(self, entries: list[Entry]) -> Any:
        """Call with a list for each argument; those that the method does not ask for are not looked at."""
        # What several share is printed for none of them.
        REQUEST.set(entries[0].connection.request_id if len(entries) == 1 else b"")
        started_ns = time.monotonic_ns()
        for entry in entries:
            if not entry.connection.started_ns:
                entry.connection.started_ns = started_ns
        return self._method.call(*map(list, zip(*[entry.arguments for entry in entries], strict=True)))


def check_result(name: str, size: int, result: Any) -> None:
    """Look whether what a method returned can be matched with its requests. Raises: WrongResult."""
    if isinstance(result, list) and len(result) == size:
        return
    requests = f"{size} requests" if size > 1 else "1 request"
    what = f"a list of {len(result)}" if isinstance(result, list) else type(result).__name__
    raise WrongResult(
        f"{name}() got a batch of {requests} and returned {what}: return a list with one result for each, in the same "
        "order"
    )
