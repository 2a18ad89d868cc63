"""Where the user's synchronous code runs: inline on the event loop while it is quick, on threads once it is slow.

The user's code stays on the main thread in both cases (libraries keep state per thread); it is the event loop that
moves to a thread of its own. It knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

#: A call that averages more than this leaves the event loop.
SLOW_NS = 1_000_000
#: Calls must average less than this to come back, so that the mode does not flap.
QUICK_NS = 500_000
#: … over at least so many calls.
QUICK_CALLS = 64
#: Weight of the newest call in the average: 1/8.
_AVERAGE_SHIFT = 3

Task = Callable[[], None]


class Runner:
    """Owns the main thread: `run` returns only after `stop`.

    `submit` and `record` belong to the event loop's thread; `wake` may be called from any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int, always_threads: bool = False) -> None:
        self.inline = not always_threads
        self._may_inline = not always_threads
        self._loop = loop
        self._threads = threads
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._average_ns = 0
        self._calls_in_mode = 0
        self._stopping = False
        self._leaving = False
        self._done: deque[Task] = deque()
        self._wake_pending = False

    def run(self) -> None:
        """Run the event loop and the submitted calls until `stop`."""
        while not self._stopping:
            self._leaving = False
            self._calls_in_mode = 0
            if self.inline:
                self._loop.run_forever()
                self.inline = False
            else:
                self._run_threads()
                self._run_rest()
                # Only now is the loop this thread's; until here calls were queued.
                self.inline = self._may_inline

    def stop(self) -> None:
        """End `run` once the calls already submitted are done; called on the event loop."""
        self._stopping = True
        self._leave()

    def submit(self, task: Task) -> None:
        """Queue a call for the threads; only while not `inline`."""
        self._tasks.put(task)

    def record(self, duration_ns: int, may_switch: bool) -> None:
        """Count a finished call; leave or enter inline mode where the average says so and `may_switch` allows."""
        self._average_ns += (duration_ns - self._average_ns) >> _AVERAGE_SHIFT
        self._calls_in_mode += 1
        if self.inline:
            if self._average_ns > SLOW_NS:
                self._leave()
        elif may_switch and self._may_inline and self._average_ns < QUICK_NS and self._calls_in_mode > QUICK_CALLS:
            self._leave()

    def require_threads(self) -> None:
        """Leave inline mode for good."""
        self._may_inline = False
        if self.inline:
            self._leave()

    def wake(self, task: Task) -> None:
        """Run `task` on the event loop; calls from threads that finish together are woken together."""
        self._done.append(task)
        if not self._wake_pending:
            self._wake_pending = True
            self._loop.call_soon_threadsafe(self._run_done)

    def _run_done(self) -> None:
        self._wake_pending = False
        while self._done:
            self._done.popleft()()

    def _leave(self) -> None:
        """End the present mode after this turn of the loop; what still comes in the turn is queued."""
        if self._leaving:
            return
        self._leaving = True
        if self.inline:
            self.inline = False
        else:
            for _ in range(self._threads):
                self._tasks.put(None)
        self._loop.stop()

    def _run_threads(self) -> None:
        threads = [threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)]
        threads += [
            threading.Thread(target=self._run_tasks, name=f"handler-{number}", daemon=True)
            for number in range(1, self._threads)
        ]
        for thread in threads:
            thread.start()
        self._run_tasks()
        for thread in threads:
            thread.join()

    def _run_rest(self) -> None:
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
