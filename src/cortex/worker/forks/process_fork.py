"""Fork processes from one that has imported libraries or constructed a class, for both fork servers."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from cortex.processes.orphans import end_with_parent

#: A process that ends becomes a zombie, and its children get another parent, within this order of time.
_PARENT_CHECK_S = 0.0005

_libc = ctypes.CDLL(None)


def freeze_memory() -> None:
    """Collect garbage, and exempt what is left from collections, which would write to pages that forks share."""
    gc.collect()
    gc.freeze()


def fork_child(run: Callable[[], int]) -> int:
    """Fork a process that ends with the exit code of `run`, or with this process; return its pid. Raises: OSError."""
    _flush_output()
    parent = os.getpid()
    pid = _fork()
    if pid == 0:
        _become(run, lambda: end_with_parent(parent))
    return pid


def fork_sibling(run: Callable[[], int]) -> None:
    """Fork a process whose parent is the parent of this one, which must be a subreaper. Raises: OSError.

    The parent reaps it, and finds out how it ended. It ends with the parent.
    """
    _flush_output()
    grandparent = os.getppid()
    pid = _fork()
    if pid == 0:
        _fork_and_end(run, grandparent)
    status = 0
    with contextlib.suppress(ChildProcessError):  # user code ignores SIGCHLD
        _, status = os.waitpid(pid, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise OSError(code, os.strerror(code)) if code > 0 else OSError(f"the fork was killed by signal {-code}")


def seed_numpy() -> None:
    """Give this process random numbers of its own, as Python's `random` does after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def seed_torch() -> None:
    """Give PyTorch's global generator random numbers of its own, likewise."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "seed"):  # not while it is being imported
        torch.seed()


def _fork_and_end(run: Callable[[], int], grandparent: int) -> NoReturn:
    code = 1
    try:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(run, lambda: _end_with_grandparent(parent, grandparent))
        code = 0
    except OSError as error:
        code = error.errno or 1
    finally:
        os._exit(code)


def _become(run: Callable[[], int], tie: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        tie()
        code = run()
    finally:
        os._exit(code)


def _end_with_grandparent(parent: int, grandparent: int) -> None:
    while os.getppid() == parent:  # it has called _exit
        time.sleep(_PARENT_CHECK_S)
    end_with_parent(grandparent)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `fork_safety` reports the threads that matter
        return os.fork()


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code may have replaced it
            stream.flush()
    _libc.fflush(None)  # output of libraries must not be printed by each fork
