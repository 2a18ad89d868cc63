"""Background tasks of user code, which run after a response, do not delay requests, and log their errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

from cortex.predictor.tracebacks import format_user_traceback
from cortex.predictor.user_forks import await_ending_forks, ending_forks
from cortex.worker.monitoring.request_log import write_log


class BackgroundTasks:
    """Runs background tasks on a thread pool, which the first task creates; `async def` ones run on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop = loop
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, task: Callable[[], Any]) -> None:
        """Schedule a task; what it raises is logged."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="after-answer")
        self._pool.submit(self._run, ending_forks(task))

    def shutdown(self) -> None:
        """Wait for all scheduled tasks."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _run(self, task: Callable[[], Any]) -> None:
        try:
            result = task()
            if inspect.isawaitable(result):
                asyncio.run_coroutine_threadsafe(contain_exit(result), self._loop).result()
        except (CancelledError, asyncio.CancelledError):
            pass  # the client of a streaming response disconnected
        except BaseException as error:  # the edge of the user's code
            write_log(f"background task failed:\n{format_user_traceback(error)}")


async def contain_exit(awaitable: Awaitable[Any]) -> Any:
    """Await user code and turn `SystemExit` and the like into a RuntimeError, which does not end the event loop."""
    try:
        return await await_ending_forks(awaitable)
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise RuntimeError(f"{type(error).__name__} was raised") from error
