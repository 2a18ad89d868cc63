"""`breakpoint()` and `pdb` in the terminal of `cortex dev`, which the processes of several APIs share.

A pipe holds one token. A process takes it before it reads from the terminal, so that one debugger runs at a time.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from cortex.worker.monitoring.request_log import write_log

_TOKEN = b"t"
_PORT_POLL_S = 0.05


class TerminalToken:
    """The right to read from the terminal."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write

    @classmethod
    def create(cls) -> TerminalToken:
        """Create the pipe, with its token."""
        token = cls(*os.pipe())
        token.put_back()
        return token

    def put_back(self) -> None:
        """Put the token back: also that of a process which died in its debugger."""
        os.write(self.write, _TOKEN)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the token; wait until no other process does."""
        os.read(self.read, 1)
        try:
            yield
        finally:
            self.put_back()

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.read)
        os.close(self.write)


def install(token: TerminalToken, on_change: Callable[[bool], object]) -> None:
    """Make all debuggers of this process wait for the terminal; `on_change` is called when one begins and ends."""
    lock = threading.RLock()  # the command `debug` starts a debugger within one
    is_held = False

    @contextlib.contextmanager
    def terminal() -> Iterator[None]:
        nonlocal is_held
        with lock:
            if is_held:
                yield
                return
            with token.held():
                is_held = True
                on_change(True)
                try:
                    yield
                finally:
                    is_held = False
                    on_change(False)

    class TerminalPdb(pdb.Pdb):
        def interaction(self, *args: Any, **kwargs: Any) -> None:
            with terminal():
                super().interaction(*args, **kwargs)

        # These print a line, such as `--Call--`, before the interaction.

        def user_call(self, frame: FrameType, argument_list: None) -> None:
            if self.stop_here(frame):
                with terminal():
                    super().user_call(frame, argument_list)

        def user_return(self, frame: FrameType, return_value: Any) -> None:
            with terminal():
                super().user_return(frame, return_value)

        def user_exception(self, frame: FrameType, exc_info: Any) -> None:
            with terminal():
                super().user_exception(frame, exc_info)

    def breakpointhook(*_: Any, **__: Any) -> None:
        frame = sys._getframe(1)
        TerminalPdb().set_trace(frame)

    pdb.Pdb = TerminalPdb  # type: ignore[misc]  # for `pdb.set_trace()`
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = breakpointhook


def listen(port: int) -> str | None:
    """Accept debuggers of editors at a port of this machine; return why that is not possible.

    The process that this one replaces may still have the port: this one gets it once the other has ended.
    """
    try:
        import debugpy  # type: ignore[import-not-found]  # noqa: PLC0415 - an optional dependency
    except ModuleNotFoundError:
        return "debugpy is not installed; add debugpy to requirements.txt, or install it beside cortex"

    def begin() -> None:
        while not _is_free(port):
            time.sleep(_PORT_POLL_S)
        try:
            debugpy.listen(("127.0.0.1", port))
        except (OSError, RuntimeError) as error:
            write_log(f"debugpy can't listen on port {port}: {error}\n")

    threading.Thread(target=begin, name="cortex-debugpy", daemon=True).start()
    return None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
