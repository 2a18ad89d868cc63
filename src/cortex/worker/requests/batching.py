"""Server-side batching: one call of the user's method for several requests of a process.

`RequestBatcher` decides on the event loop when a batch begins: a request waits only while every thread is busy, or
while `batch_timing` expects other requests within a moment. `BatchCaller` runs a batch on any thread. If a call fails,
it is repeated with each half of its requests, so that only the requests that cause the failure fail: up to 2 log2(n)
more calls for one bad request among n.

If the class has `batch_key`, the payload is parsed when a request arrives, and a batch consists of the oldest request
and those with the same key.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from cortex.errors import UserError, type_name
from cortex.predictor.binding import BoundMethod, result_kind
from cortex.predictor.interface import BATCH_KEY
from cortex.predictor.loader import BoundPredictor
from cortex.predictor.tracebacks import describe
from cortex.predictor.user_forks import await_ending_forks, end_if_forked, process_id
from cortex.worker.http.cancellation import CLIENTS
from cortex.worker.http.connection import Connection
from cortex.worker.monitoring.metrics import BatchRecorder
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.request_server import blocked_grace_ns
from cortex.worker.requests.batch_timing import BatchTiming
from cortex.worker.requests.calls import Arguments, Caller, FailedCall, Outcome
from cortex.worker.requests.runner import Runner
from cortex.worker.spec import ReplicaSpec

#: Keys of `batch_key` that are remembered while requests wait.
_MAX_KEYS = 4096

T = TypeVar("T")

Outcomes = list[tuple[Connection, Outcome]]


def batched_method(spec: ReplicaSpec, predictor: BoundPredictor) -> BoundMethod | None:
    """Return the method that is called with batches; None if each request is a call of its own.

    TensorFlow models batch below the user's method, in the model client.
    """
    method = predictor.methods.get("POST")
    return method if method is not None and spec.batches_calls else None


def for_one(method: BoundMethod) -> BoundMethod:
    """Wrap a method that takes batches into one that takes a single request."""

    def call(payload: Any, query_params: Any, headers: Any) -> Any:
        results = method.call([payload], [query_params], [headers])
        if type(results) is not list and result_kind(results) == "async":
            return _await_one(method.name, results)
        return _only_result(method.name, results)

    return replace(method, call=call)


async def _await_one(name: str, results: Awaitable[Any]) -> Any:
    return _only_result(name, await results)


def _only_result(name: str, results: Any) -> Any:
    (result,) = results_of_batch(name, 1, results)
    if isinstance(result, Exception):  # the error of this request, see `BatchCaller.finish`
        raise result
    return result


class WrongResult(UserError):
    """The result of a batch does not have one item per request."""


class WrongResultType(WrongResult):
    """The result of a batch is no list, and so would be those of its halves."""


def results_of_batch(name: str, size: int, result: Any) -> list[Any]:
    """Return the results of a batch, one per request. Raises: WrongResult; what iterating over it raises."""
    requests = f"{size} requests" if size > 1 else "1 request"
    before = f"{name}() got a batch of {requests} and returned "
    after = ": return a list with one result for each, in the same order"
    if not isinstance(result, list):
        fix = "; .tolist() converts it" if hasattr(type(result), "tolist") else ""
        if isinstance(result, tuple | Iterator):
            fix = "; list() converts it"
        raise WrongResultType(f"{before}{type_name(result)}{after}{fix}")
    items = list(result)  # a subclass may iterate otherwise
    if len(items) != size:
        raise WrongResult(f"{before}a list of {len(items)}{after}")
    return items


class Bisection(Generic[T]):
    """The calls of a batch: one with all members, then one with each half of every call that failed."""

    def __init__(self, members: Sequence[T], is_enabled: bool) -> None:
        self._pending = [list(members)]
        self._is_enabled = is_enabled

    def next(self) -> list[T] | None:
        """Return the members of the next call; None if there is none."""
        return self._pending.pop() if self._pending else None

    def split(self, part: list[T]) -> bool:
        """Schedule the halves of a call that failed; return False if it cannot be split."""
        if len(part) < 2 or not self._is_enabled:
            return False
        middle = len(part) // 2
        self._pending += [part[middle:], part[:middle]]
        return True


@dataclass(slots=True)
class WaitingRequest:
    """A request that waits for a batch."""

    connection: Connection
    deadline_ns: int  #: monotonic
    key: int = 0  #: number of its `batch_key`
    arguments: Arguments | None = None  #: if they had to be parsed for the key


@dataclass(slots=True)
class BatchMember:
    """One request of a call, with its arguments."""

    connection: Connection
    arguments: Arguments


@dataclass(slots=True)
class RequestBatch:
    """Requests that begin together."""

    connections: list[Connection]
    deadline_ns: int  #: the earliest deadline of its requests, monotonic
    began_ns: int
    bisection: Bisection[Connection]
    key: int = 0
    arguments: dict[Connection, Arguments] = field(default_factory=dict)  #: parsed, for the first call
    outcomes: Outcomes = field(default_factory=list)  #: known, and not yet sent
    calls: int = 0
    duration_ns: int = 0  #: of all calls so far


@dataclass(slots=True)
class AwaitedCall:
    """A call of an `async def` method whose result has to be awaited."""

    members: list[BatchMember]
    value: Awaitable[Any]


class RequestBatcher:
    """Collects the requests of one process for one method. Event-loop thread only."""

    def __init__(
        self,
        spec: ReplicaSpec,
        caller: BatchCaller,
        runner: Runner,
        loop: asyncio.AbstractEventLoop,
        recorder: BatchRecorder,
        settle: Callable[[Connection, Outcome], None],
        may_switch: Callable[[], bool],
    ) -> None:
        """Create a batcher.

        `settle` responds to one request; `may_switch` returns whether no other call runs, so that the runner may change
        its mode.
        """
        self._max_size = spec.max_batch_size
        self._threads = spec.threads
        self._isolates = spec.isolates_failures
        self._caller = caller
        self._runner = runner
        self._loop = loop
        self._recorder = recorder
        self._settle_one = settle
        self._may_switch = may_switch
        self._may_queue_next = caller.batch_key is None and not caller.is_async  #: on a thread
        self._timing = BatchTiming(spec.max_batch_size, spec.batch_interval_s)
        self._waiting: deque[WaitingRequest] = deque()
        #: The number of each key. Only a request that arrives compares keys, so an error of `==` fails that one alone.
        self._keys: dict[Hashable, int] = {}
        self._key_numbers = itertools.count(1)
        self._has_other_keys = False  #: the last batch left older requests behind
        self._last_size = 0  #: number of waiting requests at the last check
        self._running = 0  #: batches that have begun or are next
        self._next_size = 0  #: of the batch that begins when one of the running ends
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def may_call_single(self, now_ns: int) -> bool:
        """Return whether a request that arrives now may be called alone, on the event loop, without waiting."""
        is_free = self._runner.inline and not (self._waiting or self._running or self._is_scheduled)
        return is_free and not self._caller.is_async and self._timing.is_alone(now_ns)

    def record_single(self, began_ns: int) -> None:
        """Record the call of such a request."""
        now_ns = time.monotonic_ns()
        self._recorder.record(1, [0])
        self._timing.record(1, 0, now_ns - began_ns, now_ns)

    def add(self, connection: Connection, deadline_ns: int, now_ns: int) -> None:
        """Queue a request for a batch."""
        connection.batched_ns = now_ns
        if self._caller.batch_key is None:
            waiting = WaitingRequest(connection, deadline_ns)
        else:
            try:
                key, arguments = self._runner.call_inline(self._key_of, connection)
                waiting = WaitingRequest(connection, deadline_ns, key, arguments)
            except BaseException as error:  # an invalid body, or user code
                self._settle_one(connection, self._caller.failed_key(connection, error))
                return
        self._waiting.append(waiting)
        if self._is_scheduled or not self._is_free:
            return
        if self._timer is None or len(self._waiting) >= self._timing.target:
            self._schedule()

    def _key_of(self, connection: Connection) -> tuple[int, Arguments]:
        """Return the number of a request's key, and its arguments. Raises: as `BatchCaller.key_of`, errors of `==`."""
        key, arguments = self._caller.key_of(connection)
        if not self._waiting or len(self._keys) > _MAX_KEYS:
            self._keys.clear()
        return self._keys.setdefault(key, next(self._key_numbers)), arguments

    @property
    def _is_free(self) -> bool:
        """Return whether a thread is free, or one batch more is full: a thread continues with it at once."""
        if self._running < self._threads:
            return True
        is_next = self._may_queue_next and not self._runner.inline and self._running == self._threads
        return is_next and self._timing.is_full(len(self._waiting))

    def _schedule(self) -> None:
        """Check once everything that can be read at the moment has been read."""
        self._is_scheduled = True
        self._loop.call_soon(self._begin_batches)

    def _begin_batches(self) -> None:
        self._is_scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._is_free:
            size, last_size = len(self._waiting), self._last_size
            self._last_size = size
            if last_size < size < self._timing.target:
                self._schedule()  # others are arriving: one iteration of the loop costs next to nothing
                return
            wait_ns = self._timing.wait_ns(size, self._waiting[0].connection.batched_ns, time.monotonic_ns())
            if wait_ns and not self._has_other_keys:
                self._timer = self._loop.call_later(wait_ns / 1e9, self._begin_batches)
                return
            self._last_size = 0
            self._begin()

    def _begin(self) -> None:
        """Begin a batch with the first requests that wait, without those that disconnected or timed out."""
        now_ns = time.monotonic_ns()
        chosen: dict[Connection, WaitingRequest] = {}
        others: list[WaitingRequest] = []
        key, count = self._waiting[0].key, len(self._waiting)
        if self._caller.batch_key is not None:
            count = sum(waiting.key == key for waiting in self._waiting)
        size = self._timing.size(count)
        while self._waiting and len(chosen) < size:
            waiting = self._waiting.popleft()
            connection = waiting.connection
            if waiting.key != key:
                others.append(waiting)
                continue
            if not connection.open:
                connection.call_over()  # it may have been in a batch that timed out
                continue
            if waiting.deadline_ns <= now_ns:
                self._settle_one(connection, self._caller.timed_out(", before it could run"))
                continue
            chosen[connection] = waiting
        self._waiting.extendleft(reversed(others))
        self._has_other_keys = bool(others)
        if not chosen:
            return
        connections, earliest_ns = list(chosen), min(waiting.deadline_ns for waiting in chosen.values())
        grace_ns = self._caller.grace_ns()
        for connection in connections:
            connection.begin_batch(chosen[connection].deadline_ns + grace_ns)
        self._recorder.record(len(connections), [now_ns - connection.batched_ns for connection in connections])
        parsed = {connection: each.arguments for connection, each in chosen.items() if each.arguments is not None}
        bisection = Bisection(connections, self._isolates)
        batch = RequestBatch(connections, earliest_ns, now_ns, bisection, key, parsed)
        if self._running == self._threads:
            self._next_size = len(connections)
        self._running += 1
        if self._caller.is_async:
            self._continue(batch, self._caller.run(batch, self._settle))
        elif self._runner.inline:
            self._continue(batch, self._runner.call_inline(self._caller.run, batch, self._settle))
        else:
            self._runner.submit(partial(self._run_on_thread, batch))

    def _run_on_thread(self, batch: RequestBatch) -> None:
        awaited = self._caller.run(batch, lambda outcomes: self._runner.wake(partial(self._settle, outcomes)))
        self._runner.wake(partial(self._continue, batch, awaited))

    def _continue(self, batch: RequestBatch, awaited: AwaitedCall | None) -> None:
        if awaited is None:
            self._end(batch)
        else:
            task = self._loop.create_task(self._await(batch, awaited))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _await(self, batch: RequestBatch, first: AwaitedCall) -> None:
        awaited: AwaitedCall | None = first
        members = first.members
        try:
            async with asyncio.timeout((batch.deadline_ns - time.monotonic_ns()) / 1e9) as limit:
                while awaited is not None:
                    members = awaited.members
                    try:
                        self._caller.finish(batch, members, await await_ending_forks(awaited.value))
                    except BaseException as error:  # the edge of the user's code
                        if isinstance(error, asyncio.CancelledError) and limit.expired():
                            raise
                        self._caller.fail(batch, members, error)
                    awaited = self._caller.run(batch, self._settle)
        except TimeoutError:
            for connection in reversed(self._caller.cancel(batch, members)):
                connection.set_batch(0)
                self._waiting.appendleft(WaitingRequest(connection, self._caller.deadline_ns(connection), batch.key))
        self._end(batch)

    def _settle(self, outcomes: Outcomes) -> None:
        for connection, outcome in outcomes:
            self._settle_one(connection, outcome)

    def _end(self, batch: RequestBatch) -> None:
        self._running -= 1
        waiting, self._next_size = len(self._waiting) + self._next_size, 0
        if len(self._waiting) >= self._timing.target and not self._runner.inline:
            self._begin_batches()  # the next batch runs while the responses of this one are written
        self._settle(batch.outcomes)
        now_ns = time.monotonic_ns()
        duration_ns = now_ns - batch.began_ns if self._caller.is_async else batch.duration_ns
        if duration_ns:  # otherwise no request of the batch was valid, or had a client
            self._timing.record(len(batch.connections), waiting, duration_ns, now_ns)
        if not self._caller.is_async:
            self._runner.record(duration_ns, may_switch=self._may_switch())
        if self._waiting and not self._is_scheduled:
            self._schedule()


class BatchCaller:
    """Makes the calls of the batches of one method. Thread-safe."""

    def __init__(
        self,
        caller: Caller,
        method: BoundMethod,
        timeout_s: Callable[[], float],
        numbers: Iterator[int],
        batch_key: Callable[..., Hashable] | None = None,
    ) -> None:
        """`numbers` are those of the batches of this process; only payloads with the same `batch_key` are batched."""
        self.batch_key = batch_key
        self.is_async = method.kind == "async"
        self._caller = caller
        self._method = method
        self._timeout_s = timeout_s
        self._numbers = numbers
        self._pid = process_id()

    def key_of(self, connection: Connection) -> tuple[Hashable, Arguments]:
        """Return the key of a request, and its arguments. Raises: BadBody, PayloadError, errors of user code."""
        assert self.batch_key is not None
        arguments = self._caller.parse_arguments(connection, self._method)
        key = self.batch_key(payload=arguments[0])
        end_if_forked(self._pid)
        return key, arguments

    def failed_key(self, connection: Connection, error: BaseException) -> FailedCall:
        """Return the outcome of a request without a key."""
        return self._caller.fail(connection, BATCH_KEY, error)

    def run(self, batch: RequestBatch, settle: Callable[[Outcomes], None]) -> AwaitedCall | None:
        """Make calls until one has to be awaited; None once all are done. Never raises.

        `settle` receives outcomes that are known while calls of the batch remain.
        """
        while (part := batch.bisection.next()) is not None:
            part = self._in_time(batch, part)
            members = self._prepare(batch, part) if part else []
            if not members:
                continue
            started_ns = time.monotonic_ns()
            try:
                result = self._invoke(members)
                if type(result) is not list and result_kind(result) == "async":
                    end_if_forked(self._pid)
                    return AwaitedCall(members, result)
                self.finish(batch, members, result)
            except BaseException as error:  # the edge of the user's code
                self.fail(batch, members, error)
            batch.duration_ns += time.monotonic_ns() - started_ns
            if batch.calls > 1 and batch.outcomes:  # these need not wait for the remaining calls
                outcomes, batch.outcomes = batch.outcomes, []
                settle(outcomes)
        return None

    def finish(self, batch: RequestBatch, members: list[BatchMember], result: Any) -> None:
        """Assign the items of a result to their requests. Raises: WrongResult."""
        end_if_forked(self._pid)
        items = results_of_batch(self._method.name, len(members), result)
        returned_ns = time.monotonic_ns()
        caller, method = self._caller, self._method
        for member, item in zip(members, items, strict=True):
            connection = member.connection
            connection.returned_ns = returned_ns
            outcome: Outcome
            try:
                if isinstance(item, Exception):  # the error of one request
                    raise item
                outcome = caller.complete(connection, method, item, member.arguments)
            except BaseException as error:  # an error of this item alone
                outcome = caller.fail(connection, method, error)
            batch.outcomes.append((connection, outcome))

    def fail(self, batch: RequestBatch, members: list[BatchMember], error: BaseException) -> None:
        """Schedule calls of both halves; if it cannot be split, the error is the outcome of all members."""
        end_if_forked(self._pid)
        connections = [member.connection for member in members]
        if not isinstance(error, WrongResultType) and batch.bisection.split(connections):
            for connection in connections:
                connection.set_batch(0)
            if batch.calls == 1:
                size = len(connections)
                write_log(f"a batch of {size} requests failed, calling its halves separately: {describe(error)}\n")
            return
        failed = self._caller.fail(connections[0], self._method, error)
        if len(connections) > 1:
            ids = ", ".join(connection.request_id.decode("latin-1") for connection in connections)
            write_log(f"that was a batch of {len(connections)} requests: {ids}\n")
        batch.outcomes += [(connection, failed) for connection in connections]

    def cancel(self, batch: RequestBatch, members: list[BatchMember]) -> list[Connection]:
        """Time out the requests of a batch whose deadline has passed; return the others."""
        left = [member.connection for member in members]
        while (part := batch.bisection.next()) is not None:
            left += part
        return self._in_time(batch, left)

    def deadline_ns(self, connection: Connection) -> int:
        """Return the deadline of a request, monotonic."""
        return connection.arrived_ns + int(self._timeout_s() * 1e9)

    def grace_ns(self) -> int:
        """Return how long after the deadline of a request the supervisor ends the process."""
        return blocked_grace_ns(self._timeout_s()) if self.is_async else 0

    def timed_out(self, when: str = "") -> FailedCall:
        """Return the outcome of a request whose deadline has passed."""
        return FailedCall(504, f"timed out after {self._timeout_s():g} s{when}")

    def _in_time(self, batch: RequestBatch, part: list[Connection]) -> list[Connection]:
        """Return the requests that are connected and whose deadline has not passed; the others time out."""
        now_ns = time.monotonic_ns()
        late = [each for each in part if not each.open or self.deadline_ns(each) <= now_ns]
        batch.outcomes += [(connection, self.timed_out()) for connection in late]
        return [connection for connection in part if connection not in late]

    def _prepare(self, batch: RequestBatch, part: list[Connection]) -> list[BatchMember]:
        """Parse the arguments, for each call again, because user code may have changed them."""
        number = next(self._numbers)
        for connection in part:
            connection.set_batch(number)
        batch.calls += 1
        members = []
        for connection in part:
            try:
                arguments = batch.arguments.pop(connection, None)
                if arguments is None:
                    arguments = self._caller.parse_arguments(connection, self._method)
                members.append(BatchMember(connection, arguments))
            except BaseException as error:  # an invalid body
                batch.outcomes.append((connection, self._caller.fail(connection, self._method, error)))
        return members

    def _invoke(self, members: list[BatchMember]) -> Any:
        """Call the method with one list per parameter."""
        first = members[0].connection
        if len(members) == 1:
            first.enter(self._method.name)
        else:
            first.leave()  # lines that a call prints for several requests belong to none of them
        CLIENTS.set(tuple(member.connection for member in members))
        started_ns = time.monotonic_ns()
        for member in members:
            if not member.connection.started_ns:
                member.connection.started_ns = started_ns
        return self._method.call(*map(list, zip(*[member.arguments for member in members], strict=True)))
