"""Housekeeping of a supervisor: slow work on files, in child processes with low priority, so that it blocks nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Collection
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path

from cortex.processes.filelock import LockHeldError, hold_lock
from cortex.processes.priority import enter_background
from cortex.processes.process_tree import children, is_cleaner
from cortex.supervisor.process_slot import leave_supervisor
from cortex.worker.spec import ENVIRONMENT_COMPILED, ENVIRONMENT_COMPLETE
from cortex.worker.working_copy import remove_tree


class Housekeeping:
    """The child processes of one supervisor. They end with it; the engine deletes what they leave behind."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._compiles_environment = False

    def adopt(self, pid: int | None) -> None:
        """Reap a process of another module once it has ended."""
        if pid is not None:
            self._pids.add(pid)

    def remove(self, folder: Path) -> None:
        """Delete a folder."""
        if folder.exists():
            self._start(partial(remove_tree, folder))

    def compile(self, project: Path, path: str) -> None:
        """Compile the modules of a stored project, unless that was done: working copies lose what Python compiles.

        `path` is the user's file. It is compiled last, so that it shows whether the others were.
        """
        file = project / path
        if file.suffix == ".py" and not Path(cache_from_source(str(file))).exists():
            self._start(partial(_compile, project, file))

    def compile_environment(self, prefix: Path) -> None:
        """Compile the packages of the environment at `prefix`, unless that was done or it is the installation itself.

        It takes seconds, so it is done once processes are ready: they have compiled only the modules that they import.
        """
        folder = prefix.parent
        is_compiled = self._compiles_environment or (folder / ENVIRONMENT_COMPILED).exists()
        if not is_compiled and (folder / ENVIRONMENT_COMPLETE).exists():
            self._compiles_environment = True
            self._start(partial(_compile_environment, folder))

    def has(self, pid: int) -> bool:
        """Return whether a child process is one of these."""
        return pid in self._pids

    def reap(self) -> None:
        """Remove the processes that have ended."""
        for pid in list(self._pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._pids.discard(pid)

    def end_adopted(self, others: Collection[int | None]) -> None:
        """Kill the children of this process that it has not started: neither `others` nor those of this object.

        Those that remove shared memory end by themselves.
        """
        for pid in set(children(os.getpid())) - {*others, *self._pids}:
            with contextlib.suppress(OSError):
                if not is_cleaner(pid):
                    os.kill(pid, signal.SIGKILL)
            self._pids.add(pid)

    def _start(self, work: Callable[[], object]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no more processes: the engine deletes the replica's folder in the end
            return
        if pid == 0:
            try:
                leave_supervisor(parent)
                enter_background()
                work()
            finally:
                os._exit(0)
        self._pids.add(pid)


def _compile(project: Path, file: Path) -> None:
    import compileall  # noqa: PLC0415 - this process only

    compileall.compile_dir(project, quiet=2, rx=re.compile(re.escape(str(file)) + "$"))
    compileall.compile_file(file, quiet=2)


def _compile_environment(folder: Path) -> None:
    import compileall  # noqa: PLC0415 - as above
    import sysconfig  # noqa: PLC0415 - as above

    # Another replica compiles it, or this user may not write it.
    with contextlib.suppress(LockHeldError, OSError), hold_lock(folder / "compile.lock"):
        for packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            compileall.compile_dir(packages, quiet=2)
        (folder / ENVIRONMENT_COMPILED).touch()
