"""The processes of one installation, from /proc, and ways to kill them. Tests kill only processes found here.

A process belongs to an installation if its environment names its CORTEX_HOME or its command line a path in it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.wait import wait_until

OPERATOR, SUPERVISOR, WORKER, OTHER = "operator", "supervisor", "worker", "other"
#: Of x86-64 and AArch64: pwrite64, fsync, fdatasync.
_WRITES = {"x86_64": {"18", "74", "75"}, "aarch64": {"68", "82", "83"}}.get(os.uname().machine, set())


@dataclass(frozen=True)
class Found:
    """One process."""

    pid: int
    parent: int
    role: str


def of_home(home: Path) -> list[Found]:
    """Return the processes of the installation, without commands that a user runs, the oldest first."""
    commands: dict[int, bytes] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                if _belongs(home, command, (folder / "environ").read_bytes()) and b"cortex.cli.main" not in command:
                    commands[int(folder.name)] = command
    parents = {pid: _parent(pid) for pid in commands}
    found = [Found(pid, parents[pid], _role(pid, commands, parents)) for pid in sorted(commands)]
    return [each for each in found if each.parent]


def kill_one(home: Path, role: str, choose: random.Random) -> int:
    """Kill one process of a role, choose another if it has just ended by itself; return its pid."""

    def killed() -> int:
        pids = [each.pid for each in of_home(home) if each.role == role]
        pid = choose.choice(pids) if pids else 0
        return pid if pid and kill(home, pid) else 0

    return wait_until(killed, 60, f"there is a {role}")


def kill(home: Path, pid: int) -> bool:
    """Kill one process of the installation, never another that reuses its pid; return whether it existed."""
    with _opened(pid) as handle:
        if handle is None or pid not in {each.pid for each in of_home(home)}:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
    return False


def cut_power(home: Path, within_s: float) -> bool:
    """End every process of the installation at one instant; return whether its operator was writing at that time.

    They are stopped first, so that none observes the end of another.
    """
    caught = False
    operators = [each.pid for each in of_home(home) if each.role == OPERATOR]
    deadline = time.monotonic() + within_s
    while operators and not (caught := _is_writing(operators[0])) and time.monotonic() < deadline:
        pass
    stopped: set[int] = set()
    # A process may have forked before it was stopped.
    while left := {each.pid for each in of_home(home)} - stopped:
        for pid in sorted(left, key=lambda pid: pid not in operators):
            _send(pid, signal.SIGSTOP)
        stopped |= left
    for pid in stopped:
        _send(pid, signal.SIGKILL)
    return caught


def _belongs(home: Path, command: bytes, environ: bytes) -> bool:
    return b"CORTEX_HOME=%s\0" % os.fsencode(home) in environ or os.fsencode(home) + b"/" in command


def _role(pid: int, commands: dict[int, bytes], parents: dict[int, int]) -> str:
    if b"cortex.operator.main" in commands[pid]:
        return OPERATOR
    if b"cortex.supervisor.supervisor" not in commands[pid]:
        return OTHER
    # A worker is forked by its supervisor, or by a fork server, and has its command line.
    if b"cortex.supervisor.supervisor" not in commands.get(parents[pid], b""):
        return SUPERVISOR
    with contextlib.suppress(ProcessLookupError):
        return WORKER if os.getpgid(pid) == pid else OTHER  # housekeeping leads no group, and ends soon
    return OTHER


def _parent(pid: int) -> int:
    """The pid of its parent; 0 if it is gone or a zombie."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[1])
    return 0


def _is_writing(pid: int) -> bool:
    """Return whether one of its threads is inside a system call that writes to a file."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if (task / "syscall").read_text().partition(" ")[0] in _WRITES:
                    return True
    return False


def _send(pid: int, number: signal.Signals) -> None:
    with _opened(pid) as handle:
        if handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int | None]:
    """Hold a process by a handle that never refers to another."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)
