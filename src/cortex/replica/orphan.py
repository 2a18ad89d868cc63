"""A worker whose supervisor died: it finishes what is inside it, and serves for as long as the gateway still sends.

The gateway keeps its connections to a process open, and the operator needs a moment to take the route away. After that
this process has no purpose: it ends once nothing came for a while. Nobody enforces deadlines on it any more, so it
sets itself one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cortex.replica.app import App
from cortex.replica.spec import ORPHAN_SERVES_S, ORPHAN_UNTENDED_S, orphan_limit_s

#: Without a request for so many looks in a row, it ends.
_QUIET_LOOKS = 5
_LOOK_S = 0.05
#: A process that dies closes its sockets a moment before it stops being a parent.
_LOST_S = 1.0
_CONFIRM_S = 0.01

_PR_SET_PDEATHSIG = 1
#: The last real-time signal, which nothing else uses; its number is also a time, see `outlive_supervisor`.
_DEATH_SIGNAL = ORPHAN_UNTENDED_S
_STDERR = 2

_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p


class Output(Protocol):
    """What this process prints, which its supervisor reads and logs for as long as it lives."""

    def take_over(self) -> None:
        """Log it from now on."""

    def finish(self) -> None:
        """Log the rest, if it was taken over."""


@dataclass(frozen=True)
class Estate:
    """What a process needs of its supervisor's once that is dead."""

    output: Output
    listener: socket.socket | None  #: where its connections come in, if it may accept them


def outlive_supervisor() -> None:
    """Have the supervisor's death not end this process at once. Call it on the thread that came out of the fork."""
    # A handler gets the number of its signal, and so does `alarm` as one: from the supervisor's death on, SIGALRM ends
    # this process after 64 seconds. The kernel and libc do that alone: it works in a call that keeps the interpreter
    # lock for ever. `Orphan` sets a better limit as soon as Python runs; where user code handles SIGALRM, the only one.
    _libc.signal(_DEATH_SIGNAL, ctypes.cast(_libc.alarm, ctypes.c_void_p))
    _libc.prctl(_PR_SET_PDEATHSIG, _DEATH_SIGNAL)


class Orphan:
    """What a process does once its supervisor is gone; all of it on the event loop's thread but `finish`."""

    def __init__(
        self,
        app: App,
        loop: asyncio.AbstractEventLoop,
        output: Output,
        take_waiting: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        """Make it before the supervisor may die.

        `take_waiting` accepts what the supervisor would have, `stop` ends the process as its supervisor's word would.
        """
        self._app = app
        self._loop = loop
        self._output = output
        self._take_waiting = take_waiting
        self._stop = stop
        self._supervisor = os.getppid()
        self._lost_at = 0.0
        self._is_orphan = False
        self._retires_at = math.inf
        self._answered = 0
        self._quiet = 0

    def on_channel_lost(self) -> None:
        """Learn that nothing will come from the supervisor any more."""
        self._lost_at = time.monotonic()
        self._confirm()

    def _confirm(self) -> None:
        if os.getppid() != self._supervisor:
            self._begin()
        elif time.monotonic() - self._lost_at > _LOST_S:
            os._exit(1)  # it lives, and gives the connections to another: the user's code broke the channel
        else:
            self._loop.call_later(_CONFIRM_S, self._confirm)

    def _begin(self) -> None:
        self._is_orphan = True
        limit_s = orphan_limit_s(self._app.timeout_s)
        # Ends the process from a thread that needs no interpreter lock, and says where it hangs.
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
        _libc.signal(_DEATH_SIGNAL, signal.SIG_IGN)  # it may be about to come
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            _libc.alarm(math.ceil(limit_s) + 1)
        self._take_waiting()
        with contextlib.suppress(Exception):  # serving goes first
            self._output.take_over()
        self._retires_at = time.monotonic() + ORPHAN_SERVES_S
        self._answered = self._app.answered
        self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """End, or look again. Between two looks the event loop has read whatever lay in the sockets."""
        answered, before = self._app.answered, self._answered
        self._answered = answered
        self._quiet = 0 if self._app.has_requests or answered != before else self._quiet + 1
        if self._quiet >= _QUIET_LOOKS:
            self._stop()
            return
        if time.monotonic() > self._retires_at:
            self._retires_at = math.inf
            self._app.retire(lambda connection: None)  # letting go of a connection closes it: nobody else has it
        self._loop.call_later(_LOOK_S, self._look)

    def finish(self) -> None:
        """Do what is left at the end of the process."""
        if self._is_orphan:
            self._output.finish()
