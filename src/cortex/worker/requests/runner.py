"""Execution of synchronous user code: on threads, or inline on the event loop once calls have proved to be quick.

User code stays on the main thread in both modes, because libraries keep state per thread; the event loop moves to a
thread of its own instead. It sees no running loop in either mode, so it may start one of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

from cortex.models.loaded_models import blocking_loop
from cortex.worker.shared_state import SharedConnectionState

#: Inline mode ends once the average call takes longer than this.
SLOW_NS = 1_000_000
#: Inline mode begins once the average call takes less than this, so that the mode does not flap …
QUICK_NS = 500_000
#: … and after at least this many calls. So the first calls of a process, which may be slow, never block its event loop.
QUICK_CALLS = 64
#: Weight of the newest call in the average: 1/8.
_AVERAGE_SHIFT = 3

RunnerTask = Callable[[], None]
Ts = TypeVarTuple("Ts")
T = TypeVar("T")


class Runner:
    """Runs the event loop and synchronous calls; owns the main thread.

    `submit` and `record` are for the event-loop thread; `wake` may be called from any thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: int,
        durations: CallDurations,
        always_threads: bool = False,
        has_tasks: bool = False,
    ) -> None:
        """Create a runner; `has_tasks`: asynchronous user code runs on the loop, or has run there."""
        self.inline = False
        self.durations = durations
        self._may_inline = not always_threads
        self._loop = loop
        self._threads = threads
        self._tasks: SimpleQueue[RunnerTask | None] | _ThreadTasks = SimpleQueue() if threads == 1 else _ThreadTasks()
        self._average_ns = 0
        self._calls_in_mode = 0
        self._stopping = False
        self._leaving = False
        self._done: deque[RunnerTask] = deque()
        self._wake_pending = False
        self.is_switching = False  #: calls that were queued for the threads run while the loop does not
        self._is_loop_hidden = False
        self._inline_calls = 0
        self._has_tasks = has_tasks
        if not has_tasks:
            loop.set_task_factory(self._create_first_task)

    def run(self) -> None:
        """Run the event loop and the submitted calls until `stop`."""
        if self._threads > 1:
            _ensure_current_loop()
        while not self._stopping:
            self._leaving = False
            self._calls_in_mode = 0
            if self.inline:
                self._run_loop()
                self.inline = False
            else:
                self._run_threads()
                self.is_switching = True
                while not self._tasks.empty():
                    if (task := self._tasks.get()) is not None:
                        task()
                self.is_switching = False
                # Only now does the loop run on this thread; calls were queued until here.
                self.inline = self._may_inline

    def stop(self) -> None:
        """Make `run` return after the calls already submitted; on the event-loop thread."""
        self._stopping = True
        self._leave()

    def submit(self, task: RunnerTask, thread: int | None = None) -> None:
        """Queue a call for the threads, or for the one with this identifier; only while not `inline`."""
        if thread is None or isinstance(self._tasks, SimpleQueue):
            self._tasks.put(task)
        else:
            self._tasks.put_for(thread, task)

    def call_inline(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call plain user code on the event-loop thread, as on any other thread: it sees no running loop.

        Changing the running loop takes system calls. So it stays hidden until the next call, unless there are tasks,
        which need it.
        """
        if not self._is_loop_hidden:
            self._is_loop_hidden = True
            asyncio._set_running_loop(None)
        self._inline_calls += 1
        try:
            return call(*args)
        finally:
            self._inline_calls -= 1
            if self._has_tasks:
                self._show_loop()

    def _show_loop(self) -> None:
        if self._is_loop_hidden and not self._inline_calls:
            self._is_loop_hidden = False
            asyncio._set_running_loop(self._loop)

    def _create_first_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        loop.set_task_factory(None)
        self._has_tasks = True
        self._show_loop()
        return asyncio.Task(coroutine, loop=loop, **options)

    def record(self, duration_ns: int, may_switch: bool) -> None:
        """Record the duration of a call; change the mode if the average requires it and `may_switch` allows it."""
        self.durations.record(duration_ns)
        self._average_ns += (duration_ns - self._average_ns) >> _AVERAGE_SHIFT
        self._calls_in_mode += 1
        if self.inline:
            if self._average_ns > SLOW_NS:
                self._leave()
        elif may_switch and self._average_ns < QUICK_NS and self._calls_in_mode > QUICK_CALLS and self._is_inline_safe:
            self._leave()

    @property
    def _is_inline_safe(self) -> bool:
        """Return whether calls may run inline; a long one would block those that other threads could run."""
        return self._may_inline and (self._threads == 1 or self.durations.are_short)

    def require_threads(self) -> None:
        """Leave inline mode for good."""
        self._may_inline = False
        if self.inline:
            self._leave()

    def wake(self, task: RunnerTask) -> None:
        """Run `task` on the event loop; tasks of threads that finish together share one wakeup."""
        self._done.append(task)
        if not self._wake_pending:
            self._wake_pending = True
            self._loop.call_soon_threadsafe(self._run_done)

    def _run_done(self) -> None:
        self._wake_pending = False
        for _ in range(len(self._done)):  # those that threads add meanwhile run later, or no I/O would take place
            self._done.popleft()()

    def _leave(self) -> None:
        """End the current mode after this iteration of the loop; calls that begin in the rest of it are queued."""
        if self._leaving:
            return
        self._leaving = True
        if self.inline:
            self.inline = False
        else:
            for _ in range(self._threads):
                self._tasks.put(None)
        self._loop.stop()

    def _run_loop(self) -> None:
        self._is_loop_hidden = False
        with blocking_loop(self._loop):
            self._loop.run_forever()

    def _run_threads(self) -> None:
        def run_handler() -> None:
            _ensure_current_loop()
            self._run_tasks()

        threads = [threading.Thread(target=self._run_loop, name="event-loop", daemon=True)]
        threads += [
            threading.Thread(target=run_handler, name=f"handler-{number}", daemon=True)
            for number in range(1, self._threads)
        ]
        for thread in threads:
            thread.start()
        self._run_tasks()
        for thread in threads:
            thread.join()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class _ThreadTasks:
    """A queue for several threads, with tasks that only one of them may take. Slower than `SimpleQueue`.

    What continues a generator is for the thread that began it: a connection of SQLite or Django belongs to its thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._shared: deque[RunnerTask | None] = deque()
        self._own: defaultdict[int, deque[RunnerTask]] = defaultdict(deque)

    def put(self, task: RunnerTask | None) -> None:
        with self._changed:
            self._shared.append(task)
            self._changed.notify()

    def put_for(self, thread: int, task: RunnerTask) -> None:
        with self._changed:
            self._own[thread].append(task)
            self._changed.notify_all()

    def get(self) -> RunnerTask | None:
        """Wait for a task of this thread, or one that any thread may take."""
        own = self._own[threading.get_ident()]
        with self._changed:
            while True:
                if own:
                    return own.popleft()
                if self._shared:
                    return self._shared.popleft()
                self._changed.wait()

    def empty(self) -> bool:
        """Return whether this thread has nothing to take."""
        with self._changed:
            return not self._shared and not self._own[threading.get_ident()]


def _ensure_current_loop() -> None:
    """Give this thread a current event loop for user code, as Python does on the main thread only.

    A call must not depend on its thread: once calls are inline, all are on the main thread. The loop stays open after
    the end of the thread, because user code may have kept it.
    """
    try:
        asyncio.get_event_loop()
    except (RuntimeError, DeprecationWarning):
        asyncio.set_event_loop(asyncio.new_event_loop())


# Whether the gateway may send requests ahead.

#: Calls are short if the one that a request meets takes at most this long on average.
LIMIT_NS = 5_000_000
MIN_WEIGHT_NS = 1_000_000
#: After as many calls, 1/64 of the excess is forgotten: half of it after 11,000 calls. The first ones do not count,
#: because they may have to load something; nothing is sent ahead to a process before it has run twice as many.
DECAY_CALLS = 256
_DECAY_SHIFT = 6


class CallDurations:
    """Decide whether the calls of a process are so short that the gateway may send it requests ahead.

    A request that is sent ahead waits for the call that runs when it arrives. The average duration of that call is not
    the average of all calls: a long call is met more often, in proportion to its duration d. So it is Σd² / Σd, and

        Σd² / Σd ≤ LIMIT   ⇔   Σd·(d − LIMIT) ≤ 0

    which is one sum, the excess. One call of 8 s among 10,000 of 1 ms makes it positive, although their average is
    1.8 ms. The weight d is at least `MIN_WEIGHT_NS`: between calls of microseconds, each pause of a busy machine would
    be too long. The result is in the memory shared with the supervisor.
    """

    def __init__(self, shared_state: SharedConnectionState) -> None:
        self.are_short = False
        self._shared_state = shared_state
        self._excess = 0
        self._calls = 0
        self._is_warm = False

    def record(self, duration_ns: int) -> None:
        """Record a call. Event-loop thread only."""
        weight_ns = duration_ns if duration_ns > MIN_WEIGHT_NS else MIN_WEIGHT_NS
        self._excess += weight_ns * (duration_ns - LIMIT_NS)
        self._calls += 1
        if self._calls >= DECAY_CALLS:
            self._calls = 0
            if self._is_warm:
                self._excess -= self._excess >> _DECAY_SHIFT
                if not self.are_short and self._excess <= 0:
                    self._set(True)
            else:
                self._is_warm = True
                self._excess = 0
        if self.are_short and self._excess > 0:
            self._set(False)

    def _set(self, are_short: bool) -> None:
        self.are_short = are_short
        self._shared_state.has_short_calls = are_short
