"""Processes of the system under test: discovery, CPU time and memory, termination.

The benchmark is the subreaper of its descendants and runs one system at a time. Every descendant that is not a load
generator therefore belongs to that system, regardless of forks and sessions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants() -> list[psutil.Process]:
    """Return every living descendant of this process."""
    return [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]


def tree(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes with these ids and all their descendants."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found.update((process.pid, process) for process in (root, *root.children(recursive=True)))
    return list(found.values())


def cpu_s(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """Return user and system seconds of each process so far, in ticks of 10 ms."""
    used: dict[int, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
    return used


def cpu_between(before: dict[int, float], after: dict[int, float]) -> float:
    """Return the seconds used between two readings, without processes that ended."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def cpu_with_ended_s() -> float:
    """Return user and system seconds of all descendants, of those too that ended and were waited for.

    Where processes come and go this is exact; readings of the living ones would lose those that went.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def pss_mb(processes: Iterable[psutil.Process]) -> float:
    """Return the proportional set size of all of them together, in MB (10^6 bytes)."""
    total_kib = 0
    for process in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total_kib += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total_kib * 1024 / 1e6


def end(roots: Iterable[psutil.Process], grace_s: float) -> None:
    """Terminate these processes and their descendants; kill by pid what is left after `grace_s`."""
    asked = list(roots)
    for process in asked:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    wait(lambda: not any(_is_alive(process) for process in asked), grace_s)
    # Grandchildren became our own children when their parents ended.
    for signal_name, wait_s in (("terminate", 2.0), ("kill", 5.0)):
        left = descendants()
        for process in left:
            with contextlib.suppress(psutil.Error):
                getattr(process, signal_name)()
        wait(lambda: not descendants(), wait_s)
        if not descendants():
            return


@contextlib.contextmanager
def started(command: list[str], environ: dict[str, str], cwd: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in its own session, its output in `log`, and end it and its descendants at the exit."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            end([psutil.Process(process.pid)], grace_s=5.0)
        process.wait()


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs; reap it if it is an ended child."""
    with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        if process.ppid() == os.getpid():
            os.waitpid(process.pid, os.WNOHANG)
    return False


def wait(predicate: Callable[[], bool], timeout_s: float) -> None:
    """Wait until a predicate is true, for at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not predicate() and time.monotonic() < deadline:
        time.sleep(0.05)


class PeakMemory:
    """Highest PSS of all descendants while a block runs, sampled twice per second because sampling costs CPU time."""

    def __init__(self, every_s: float = 0.5) -> None:
        self.mb = 0.0
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.mb = max(self.mb, pss_mb(psutil.Process().children(recursive=True)))
            if self._over.wait(self._every_s):
                return
