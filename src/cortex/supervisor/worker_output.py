"""The output of a request worker whose supervisor has died: the worker reads its own pipes and writes the log."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Mapping

from cortex.engine.log_writer import SUPERVISOR, LogWriter

_READ_BYTES = 64 * 1024
_POLL_MS = 50
_FINISH_S = 1.0


class WorkerOutput:
    """The pipes of one process: stream by read end. The process keeps them open so that printing never fails."""

    def __init__(self, log_path: str, index: int, pipes: Mapping[int, str]) -> None:
        self._log_path = log_path
        self._index = index
        self._pipes = dict(pipes)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cortex-output", daemon=True)

    def take_over(self) -> None:
        """Log all further output, and what the supervisor has not read. Lines that it had partly read are torn."""
        # Several orphans may write to one file, so none of them rotates it: they live for a moment only.
        self._log = LogWriter(self._log_path, max_bytes=sys.maxsize)
        message = "lost its supervisor: it finishes its requests and ends"
        self._log.line(self._index, SUPERVISOR, f"process {os.getpid()} {message}")
        self._thread.start()

    def finish(self) -> None:
        """Log the remaining output."""
        if self._thread.is_alive():
            self._is_ending.set()
            self._thread.join(_FINISH_S)

    def _run(self) -> None:
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe, select.POLLIN)
        while self._pipes:
            is_ending = self._is_ending.is_set()
            ready = poll.poll(_POLL_MS)
            for pipe, _ in ready:
                if not self._read(pipe):
                    poll.unregister(pipe)
                    del self._pipes[pipe]
            if is_ending and not ready:
                break
        self._log.line(self._index, SUPERVISOR, f"process {os.getpid()} stopped")
        self._log.close()

    def _read(self, pipe: int) -> bool:
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # the user's code closed the descriptor
            return False
        self._log.feed(self._index, self._pipes[pipe], data)
        return bool(data)
