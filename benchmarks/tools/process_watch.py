"""Sampler of one process's memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path


class Watch:
    """Samples one process a few times per second while a block runs."""

    def __init__(self, pid: int, every_s: float = 0.1) -> None:
        self.samples: list[tuple[float, float, float]] = []  #: seconds, RSS, and of that what no file backs; in MB
        self._pid = pid
        self._every_s = every_s
        self._start = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def now_s(self) -> float:
        """Return the time on the samples' clock."""
        return time.monotonic() - self._start

    def between(self, start_s: float, end_s: float) -> list[float]:
        """Return RSS in MB in that period."""
        return [rss for at, rss, _ in self.samples if start_s <= at <= end_s]

    def _run(self) -> None:
        while True:
            self.samples.append((self.now_s(), *memory_mb(self._pid)))
            if self._over.wait(self._every_s):
                return


def memory_mb(pid: int) -> tuple[float, float]:
    """Return RSS and its anonymous part. Raises: OSError if the process has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon"))}
    return int(fields["VmRSS"]) * 1024 / 1e6, int(fields["RssAnon"]) * 1024 / 1e6
