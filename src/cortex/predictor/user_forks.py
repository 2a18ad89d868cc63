"""Forks by user code: a child that leaves a call of user code ends.

It would go on as a second worker, with the sockets of the first. Children of `multiprocessing` end by themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_process_id = os.getpid()


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


def _after_fork() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_after_fork)
