"""Makes one call of the requests that wait, where the API batches them: on the event loop's thread, but for the call.

A request waits only while every thread is busy, or `batch_timing` expects others within a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from cortex.replica.batch_timing import BatchTiming
from cortex.replica.batches import Awaited, Batch, BatchCaller, Parts, Told
from cortex.replica.calls import Outcome
from cortex.replica.http import Connection
from cortex.replica.recorder import BatchRecorder
from cortex.replica.runner import Runner
from cortex.replica.spec import ReplicaSpec

_NS_PER_S = 1_000_000_000
#: How much later than its deadline an `async def` call is left to the supervisor: the loop ends it first if it can.
ASYNC_GRACE_NS = 250_000_000
#: After so long nobody waits for those any more that were inside a process that died.
_SUSPECTED_S = 300.0


class Settles(Protocol):
    """What answers the requests of a batch, on the loop's thread."""

    def settle_batched(self, connection: Connection, outcome: Outcome) -> None:
        """Answer one."""

    def may_switch(self) -> bool:
        """Tell whether nothing but batches is running."""


class Batcher:
    """Collects the requests of one process for one method."""

    def __init__(
        self,
        spec: ReplicaSpec,
        caller: BatchCaller,
        runner: Runner,
        loop: asyncio.AbstractEventLoop,
        recorder: BatchRecorder,
        app: Settles,
    ) -> None:
        self._max_size = spec.max_batch_size
        self._threads = spec.threads
        self._isolates = spec.isolates_failures
        self._caller = caller
        self._runner = runner
        self._loop = loop
        self._recorder = recorder
        self._app = app
        self._timing = BatchTiming(spec.max_batch_size, spec.batch_interval_s)
        self._waiting: deque[tuple[Connection, int]] = deque()
        self._seen = 0  #: how many waited at the last look
        self._running = 0
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: dict[bytes, int] = {}

    def suspect(self, groups: Mapping[str, int]) -> None:
        """Learn which requests were inside a process that died: each is called with those of its group only.

        One group after the other, so that the next death tells which one is to blame. They may be told in parts.
        """
        self._groups |= {request_id.encode("latin-1"): group for request_id, group in groups.items()}
        self._loop.call_later(_SUSPECTED_S, self._groups.clear)

    def may_call_alone(self, now_ns: int) -> bool:
        """Tell whether a request that comes now may be called by itself, on the loop, without a look for others."""
        is_free = self._runner.inline and not (self._waiting or self._running or self._is_due)
        return is_free and not (self._caller.is_async or self._groups) and self._timing.is_alone(now_ns)

    def called_alone(self, began_ns: int) -> None:
        """Learn that such a request was called."""
        now_ns = time.monotonic_ns()
        self._recorder.began(1, [0])
        self._timing.called(1, 0, now_ns - began_ns, now_ns)

    def add(self, connection: Connection, deadline_ns: int, now_ns: int) -> None:
        """Take a request; its row has begun, and it waits."""
        connection.batched_ns = now_ns
        self._waiting.append((connection, deadline_ns))
        if self._is_due or not self._is_free:
            return
        if self._timer is None or len(self._waiting) >= self._timing.expected:
            self._look_soon()

    @property
    def _is_free(self) -> bool:
        return self._running < (1 if self._groups else self._threads)

    def _look_soon(self) -> None:
        """Look once all that can be read at the moment has been read."""
        self._is_due = True
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._is_free:
            size, seen = len(self._waiting), self._seen
            self._seen = size
            if seen < size < self._timing.expected:
                self._look_soon()  # others come this very moment: a turn of the loop costs next to nothing
                return
            wait_ns = self._timing.wait_ns(size, self._waiting[0][0].batched_ns, time.monotonic_ns())
            if wait_ns:
                self._timer = self._loop.call_later(wait_ns / _NS_PER_S, self._look)
                return
            self._seen = 0
            self._begin()

    def _begin(self) -> None:
        """Begin a batch with the first that wait, less those whose client is gone, or whose time is over."""
        now_ns = time.monotonic_ns()
        deadlines: dict[Connection, int] = {}
        others: list[tuple[Connection, int]] = []
        size = self._timing.size(len(self._waiting))
        group = self._groups.get(self._waiting[0][0].request_id) if self._groups else None
        while self._waiting and len(deadlines) < size:
            connection, deadline_ns = self._waiting.popleft()
            if self._groups and self._groups.get(connection.request_id) != group:
                others.append((connection, deadline_ns))
                continue
            if not connection.open:
                self._groups.pop(connection.request_id, None)
                connection.call_over()  # it was in a batch before, whose time was over
                continue
            if deadline_ns <= now_ns:
                self._groups.pop(connection.request_id, None)
                self._app.settle_batched(connection, self._caller.timed_out(", before it could run"))
                continue
            deadlines[connection] = deadline_ns
        self._waiting.extendleft(reversed(others))
        if not deadlines:
            return
        connections, earliest_ns = list(deadlines), min(deadlines.values())
        number = self._caller.next_number()
        for connection in connections:
            connection.join(number, deadlines[connection] + (ASYNC_GRACE_NS if self._caller.is_async else 0))
        self._recorder.began(len(connections), [now_ns - connection.batched_ns for connection in connections])
        batch = Batch(connections, earliest_ns, now_ns, Parts(connections, self._isolates))
        self._running += 1
        if self._runner.inline or self._caller.is_async:
            self._go_on(batch, self._caller.run(batch, self._settle))
        else:
            self._runner.submit(partial(self._run_on_thread, batch))

    def _run_on_thread(self, batch: Batch) -> None:
        awaited = self._caller.run(batch, lambda told: self._runner.wake(partial(self._settle, told)))
        self._runner.wake(partial(self._go_on, batch, awaited))

    def _go_on(self, batch: Batch, awaited: Awaited | None) -> None:
        if awaited is None:
            self._end(batch)
        else:
            task = self._loop.create_task(self._await(batch, awaited))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _await(self, batch: Batch, first: Awaited) -> None:
        awaited: Awaited | None = first
        entries = first.entries
        try:
            async with asyncio.timeout((batch.deadline_ns - time.monotonic_ns()) / _NS_PER_S) as limit:
                while awaited is not None:
                    entries = awaited.entries
                    try:
                        self._caller.finish(batch, entries, await awaited.value)
                    except BaseException as error:  # the edge of the user's code
                        if isinstance(error, asyncio.CancelledError) and limit.expired():
                            raise
                        self._caller.fail(batch, entries, error)
                    awaited = self._caller.run(batch, self._settle)
        except TimeoutError:
            for connection in reversed(self._caller.give_up(batch, entries)):
                connection.rejoin(0)
                self._waiting.appendleft((connection, self._caller.deadline_ns(connection)))
        self._end(batch)

    def _settle(self, told: Told) -> None:
        for connection, outcome in told:
            self._app.settle_batched(connection, outcome)

    def _end(self, batch: Batch) -> None:
        self._running -= 1
        if self._groups:
            for connection in batch.connections:
                self._groups.pop(connection.request_id, None)
        waiting = len(self._waiting)
        if waiting >= self._max_size and not self._runner.inline:
            self._look()  # the next batch runs while this one is answered
        self._settle(batch.told)
        now_ns = time.monotonic_ns()
        duration_ns = now_ns - batch.began_ns if self._caller.is_async else batch.duration_ns
        self._timing.called(len(batch.connections), waiting, duration_ns, now_ns)
        if not self._caller.is_async:
            self._runner.record(duration_ns, may_switch=self._app.may_switch())
        if self._waiting and not self._is_due:
            self._look_soon()
