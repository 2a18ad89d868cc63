"""`cortex dev` in a pseudo-terminal, as a user runs it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from harness.wait import wait_until

TIMEOUT_S = 20.0
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class DevTerminal:
    """A `cortex dev` process whose standard streams are a terminal. Use it in a `with` statement."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        python: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._output = b""
        command = [sys.executable, *python, "-m", "cortex.cli.main", "dev", "--port", "0", *arguments]
        variables = {**os.environ, "CORTEX_HOME": str(folder.parent / "home"), "TERM": "dumb", **(environ or {})}
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(folder)
                os.execve(sys.executable, command, variables)
            finally:
                os._exit(127)
        self._has_ended = threading.Event()
        self._closing, self._close = os.pipe()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> DevTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            children = psutil.Process(self.pid).children(recursive=True) if psutil.pid_exists(self.pid) else []
            if not self._has_ended.is_set():
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()
        # The number of a closed descriptor is soon that of another terminal, whose output the thread would take.
        os.close(self._close)
        self._reader.join()
        os.close(self._closing)
        os.close(self._descriptor)

    @property
    def text(self) -> str:
        """The output so far, without colours."""
        return _ANSI.sub("", self._output.decode(errors="replace").replace("\r\n", "\n"))

    @property
    def url(self) -> str:
        """The address of the server, once it has been printed."""
        found = re.search(r"http://127\.0\.0\.1:\d+", self.expect("Ctrl-C ends"))
        assert found, self.text
        return found[0]

    def expect(self, text: str, count: int = 1, timeout_s: float = TIMEOUT_S) -> str:
        """Wait until the output contains `text` this often; return the output."""
        try:
            wait_until(lambda: self.text.count(text) >= count, timeout_s)
        except AssertionError:
            raise AssertionError(f"{text!r} is not {count} times in:\n{self.text}") from None
        return self.text

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._descriptor, keys.encode())

    def processes(self) -> list[psutil.Process]:
        """Return all processes that it has started."""
        return psutil.Process(self.pid).children(recursive=True)

    def process_of(self, word: str) -> psutil.Process:
        """Return the process with this word in its command line, once there is just one."""
        found: list[psutil.Process] = []

        def is_alone() -> bool:
            found[:] = [each for each in self.processes() if word in " ".join(_command_line(each))]
            return len(found) == 1

        wait_until(is_alone, TIMEOUT_S)
        return found[0]

    def interrupt(self) -> int:
        """Press Ctrl-C and wait for the end; return the exit code."""
        self.type("\x03")
        status = 0

        def has_ended() -> bool:
            nonlocal status
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return pid != 0

        try:
            wait_until(has_ended, TIMEOUT_S)
        except AssertionError:
            raise AssertionError(f"cortex dev did not end:\n{self.text}") from None
        self._has_ended.set()
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> None:
        while True:
            try:
                if self._closing in select.select([self._descriptor, self._closing], [], [])[0]:
                    return
                data = os.read(self._descriptor, 65536)
            except OSError:
                return
            if not data:
                return
            self._output += data


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []
