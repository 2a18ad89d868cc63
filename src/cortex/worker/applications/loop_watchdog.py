"""Loop watchdog: logs which request blocks the event loop, and where in the user's code.

A call that blocks the loop delays all other requests of the process, and nothing else shows it until the supervisor
ends the process. While the process has calls, a thread asks the loop for an answer every half second. If there is none
for a second, it logs the stack of the loop's thread. Code that holds the interpreter lock stops this thread as well.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from cortex.predictor.tracebacks import format_user_stack
from cortex.worker.monitoring.request_log import REQUEST, write_log

#: Time without an answer after which the loop counts as blocked.
BLOCKED_S = 1.0
_INTERVAL_S = 0.5
#: Blocks that follow the logged one within this time are not logged.
_LOG_INTERVAL_S = 10.0


class LoopWatchdog:
    """Watches the event loop of one process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        request_of: Callable[[asyncio.Task[Any]], bytes],
        is_idle: Callable[[], bool],
    ) -> None:
        """Create the watchdog: `request_of` returns the id under which a task is logged, empty if it has none."""
        self._loop = loop
        self._request_of = request_of
        self._is_idle = is_idle
        self._thread_id = 0  #: of the loop
        self._has_calls = threading.Event()
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None
        self._silent_until = 0.0

    def watch(self) -> None:
        """Watch the loop until it has no call; to be called for each new one. Event-loop thread only."""
        if self._has_calls.is_set():
            return
        self._has_calls.set()
        if self._thread is None:
            self._thread_id = threading.get_ident()
            self._thread = threading.Thread(target=self._run, name="cortex-loop-watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._has_calls.wait()
            self._answered.clear()
            asked_at = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:  # the loop is closed
                return
            if not self._answered.wait(BLOCKED_S) and self._report():
                self._answered.wait()
                write_log(f"the event loop was blocked for {time.monotonic() - asked_at:.1f} s\n")
            self._has_calls.clear()
            if not self._is_idle():  # otherwise the next call sets it
                self._has_calls.set()
            time.sleep(_INTERVAL_S)

    def _report(self) -> bool:
        """Log where the loop stands; return False if it waits for the processor, or has been logged recently."""
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread_id)
        now = time.monotonic()
        if task is None or frame is None or self._answered.is_set() or now < self._silent_until:
            return False
        self._silent_until = now + _LOG_INTERVAL_S
        log_id = self._request_of(task)
        REQUEST.set(log_id)
        name = f"request {log_id.decode('latin-1').partition(':')[0]}" if log_id else "a task"
        write_log(
            f"{name} blocks the event loop, and with it all requests of this process; run blocking code on a thread, "
            "with `def` instead of `async def` or with asyncio.to_thread. It is at:\n"
            f"{format_user_stack(frame)}"
        )
        return True
