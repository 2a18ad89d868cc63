"""What a worker prints, for when its supervisor is dead: it then reads its own pipes, and writes the replica's log."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Mapping

from cortex.engine.log_writer import LogWriter

_READ_BYTES = 64 * 1024
_LOOK_MS = 50
_FINISH_S = 1.0


class WorkerOutput:
    """The pipes of one process, by read end: which stream it is. They are open here so that printing never fails."""

    def __init__(self, log_path: str, index: int, pipes: Mapping[int, str]) -> None:
        self._log_path = log_path
        self._index = index
        self._pipes = dict(pipes)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cortex-output", daemon=True)

    def take_over(self) -> None:
        """Log what is printed from now on, and what the supervisor has not read. Lines it had read half of are torn."""
        # Several processes may do so to one file, which is renamed by none of them: they live for a moment only.
        self._log = LogWriter(self._log_path, max_bytes=sys.maxsize)
        words = "lost its supervisor: it finishes what is inside it, and ends"
        self._log.line(self._index, "s", f"process {os.getpid()} {words}")
        self._thread.start()

    def finish(self) -> None:
        """Log the rest."""
        if self._thread.is_alive():
            self._is_ending.set()
            self._thread.join(_FINISH_S)

    def _run(self) -> None:
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe, select.POLLIN)
        while self._pipes:
            is_ending = self._is_ending.is_set()
            ready = poll.poll(_LOOK_MS)
            for pipe, _ in ready:
                if not self._read(pipe):
                    poll.unregister(pipe)
                    del self._pipes[pipe]
            if is_ending and not ready:
                break
        self._log.line(self._index, "s", f"process {os.getpid()} stopped")
        self._log.close()

    def _read(self, pipe: int) -> bool:
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # the user's code closed what is not its own
            return False
        self._log.feed(self._index, self._pipes[pipe], data)
        return bool(data)
