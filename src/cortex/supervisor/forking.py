"""Forks a worker from its supervisor: the child keeps only the code and its end of the channel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import NoReturn

from cortex.replica.channel import Channel
from cortex.replica.request_log import mark_streams
from cortex.supervisor.process_slot import ProcessSlot

_PR_SET_PDEATHSIG = 1
#: Raised so that the kernel kills the user's code, and not its supervisor, when memory runs out.
_WORKER_OOM_SCORE = 500

_libc = ctypes.CDLL(None)


def fork(slot: ProcessSlot, channel: Channel) -> tuple[int, int, int]:
    """Start a process of `slot`; return its pid and the read ends of its stdout and stderr. Raises: OSError."""
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        parent = os.getpid()
        pid = os.fork()
    except OSError:
        for fd in pipes:
            os.close(fd)
        raise
    stdout_read, stdout_write, stderr_read, stderr_write = pipes
    if pid == 0:
        os.dup2(stdout_write, 1)
        os.dup2(stderr_write, 2)
        slot.outputs = {stdout_read: "o", stderr_read: "e"}
        _become_worker(slot, channel, parent)
    for fd in (stdout_write, stderr_write):
        os.close(fd)
    for fd in (stdout_read, stderr_read):
        os.set_blocking(fd, False)
    return pid, stdout_read, stderr_read


def _become_worker(slot: ProcessSlot, channel: Channel, parent: int) -> NoReturn:
    """Turn a fresh fork into a worker. Never returns, so that no inherited object is finalized in the child."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_WORKER_OOM_SCORE))
        first = 3
        # Keep the read ends of its own output too: without a reader, printing would fail once the supervisor is dead.
        for kept in sorted((channel.fileno(), *slot.outputs, *slot.inherited)):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, _highest_fd() + 1)
        mark_streams()
        code = slot.run(channel)
    finally:
        os._exit(code)


def _highest_fd() -> int:
    try:
        return max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208 - names only, no Path objects in a fresh fork
    except OSError:
        return int(os.sysconf("SC_OPEN_MAX"))
