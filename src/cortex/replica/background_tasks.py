"""Work that the user asked to be done after an answer: it must neither delay requests nor disappear when it raises."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

from cortex.predictor.tracebacks import format_user_traceback
from cortex.replica.errors import write_log


class AfterCalls:
    """Runs such calls on threads of their own, made when the first one comes; `async def` ones on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop = loop
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, call: Callable[[], Any]) -> None:
        """Run `call` soon; what it raises goes to the log."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="after-answer")
        self._pool.submit(self._run, call)

    def shutdown(self) -> None:
        """Wait for the calls that were begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            result = call()
            if inspect.isawaitable(result):
                asyncio.run_coroutine_threadsafe(contained(result), self._loop).result()
        except (CancelledError, asyncio.CancelledError):
            pass  # the client of a streaming answer left
        except BaseException as error:  # the edge of the user's code
            write_log(f"after the answer was sent:\n{format_user_traceback(error)}")


async def contained(awaitable: Awaitable[Any]) -> Any:
    """Await the user's code; what it raises to end a program ends the work, not the event loop and all calls on it."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise RuntimeError(f"{type(error).__name__} was raised") from error
