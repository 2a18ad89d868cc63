"""Forks by user code: a child that leaves a call of user code ends.

It would go on as a second worker, with the sockets of the first. Children of `multiprocessing` end by themselves.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Awaitable, Callable, Generator
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
T = TypeVar("T")

_process_id = os.getpid()
_loop: asyncio.AbstractEventLoop | None = None  #: that of this process


def process_id() -> int:
    """Return the id of this process, without a system call."""
    return _process_id


def end_if_forked(parent: int) -> None:
    """End this process if user code has forked it from process `parent`; call it whenever user code has returned.

    It ends as a Python program would: the exception that is being handled, if any, is printed.
    """
    if _process_id == parent:
        return
    code = 1
    try:
        error = sys.exception()
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
        elif error is None:
            code = 0
        else:
            from cortex.predictor.tracebacks import format_user_traceback  # noqa: PLC0415 - which imports this module

            sys.stderr.write(f"a process that user code forked failed:\n{format_user_traceback(error)}")
    finally:
        os._exit(code)


def ending_forks(call: Callable[P, T]) -> Callable[P, T]:
    """Return `call`, after which children that it forked end."""
    parent = _process_id

    @wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        finally:
            end_if_forked(parent)

    return guarded


@types.coroutine
def await_ending_forks(awaitable: Awaitable[T]) -> Generator[Any, Any, T]:
    """Await user code, as `await awaitable`; children that it forks end when it returns, raises or waits.

    They would run the event loop otherwise, which shares its sockets with that of the parent.
    """
    parent, steps = _process_id, awaitable.__await__()
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            if error is not None:
                waits_for = steps.throw(error)
            else:
                waits_for = next(steps) if value is None else steps.send(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            end_if_forked(parent)
            value = error = None  # an exception that is kept here would refer to itself by its traceback
        try:
            value = yield waits_for
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as thrown:
            error = thrown


def end_forks_of_threads(loop: asyncio.AbstractEventLoop) -> None:
    """End children that are forked on other threads once they report to the event loop of this process.

    Threads of frameworks and of `asyncio.to_thread` do so when user code has returned.
    """
    global _loop
    _loop = loop


def _after_fork() -> None:
    global _process_id, _loop
    parent, _process_id = _process_id, os.getpid()
    if _loop is None:
        return

    def report(*args: Any, **options: Any) -> Any:
        error = next((each for each in args if isinstance(each, BaseException)), None)
        try:
            if error is not None:
                raise error
        finally:
            end_if_forked(parent)

    _loop.call_soon_threadsafe = report  # type: ignore[method-assign, assignment]
    _loop = None


os.register_at_fork(after_in_child=_after_fork)
