"""Detached processes: started in a session of their own, adopted later by their identity file, ended with that session.

Starts with the CLI: imports little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from cortex.home import write_private
from cortex.processes.identity import Identity
from cortex.processes.process_tree import is_cleaner

_OUTPUT_TAIL_BYTES = 2000


class Daemon:
    """A detached process recorded in an identity file, so that a later process of ours can adopt it."""

    def __init__(self, identity_file: Path) -> None:
        self.identity: Identity | None = None
        self._file = identity_file
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while the process is known; it may have ended."""
        return self.identity.pid if self.identity is not None else None

    def start(
        self,
        command: Sequence[str],
        *,
        output: IO[bytes],
        errors: IO[bytes] | None = None,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process and record its identity. Raises: OSError."""
        self._child = start_detached(command, output=output, errors=errors, cwd=cwd, env=env)
        self.record(Identity.of(self._child.pid))

    def adopt(self, identity: Identity | None = None) -> bool:
        """Take over the process of `identity`, or of the identity file; return whether it runs."""
        self._child = None
        self.identity = identity or Identity.read(self._file)
        return self.is_alive()

    def record(self, identity: Identity) -> None:
        """Set the identity and write it to the file. Raises: OSError."""
        if self._child is not None and self._child.pid != identity.pid:
            self._child = None
        self.identity = identity
        write_private(self._file, identity.to_json())

    def is_alive(self) -> bool:
        """Return whether the process runs. Reaps it if it is a child of this process."""
        if self._child is not None:
            return self._child.poll() is None
        return self.identity is not None and self.identity.is_alive()

    def kill(self) -> None:
        """Kill every process of its session."""
        if self.identity is not None:
            kill_session(self.identity)

    def forget(self) -> None:
        """Remove the identity file."""
        self._file.unlink(missing_ok=True)
        self.identity = self._child = None


def start_detached(
    command: Sequence[str],
    *,
    output: IO[bytes],
    errors: IO[bytes] | None = None,
    input_: IO[str] | int | None = None,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that it outlives this one. Standard error defaults to `output`.

    Raises: OSError.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if input_ is None else input_,
        stdout=output,
        stderr=output if errors is None else errors,
        cwd=cwd,
        env=None if env is None else dict(env),
        start_new_session=True,
        pass_fds=pass_fds,
    )


def output_tail(file: Path, max_bytes: int = _OUTPUT_TAIL_BYTES) -> str:
    """Return the end of a process's output, for an error message; empty if there is none."""
    try:
        return file.read_bytes()[-max_bytes:].decode(errors="replace").strip()
    except OSError:
        return ""


def kill_session(leader: Identity) -> None:
    """Kill every process of the session that `leader` created, the leader included.

    Those that remove shared memory of the others are left, and end by themselves.

    The kernel does not reuse a session id while a process of the session lives. Once all have ended, another session
    may get the id; its leader then has another identity.
    """
    if _is_over(leader):
        return
    killed: set[int] = set()
    # Again: one of them may have forked meanwhile.
    while members := {pid for pid in _members(leader) if pid not in killed and not is_cleaner(pid)}:
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= members


def has_workers(leader: Identity) -> bool:
    """Return whether workers still run in the session that `leader` created, a supervisor that has ended.

    A worker leads a process group. Whatever the user's code starts is in that group, unless it creates its own.
    """
    if _is_over(leader):
        return False
    return any(pid != leader.pid and _leads_group(pid) for pid in _members(leader))


def _members(leader: Identity) -> Iterator[int]:
    import psutil  # noqa: PLC0415 - 20 ms, which commands that end no session save

    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader.pid and _is_younger(pid, leader):
                yield pid


def _leads_group(pid: int) -> bool:
    import psutil  # noqa: PLC0415 - as above

    try:
        return os.getpgid(pid) == pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def _is_over(leader: Identity) -> bool:
    """Return whether the session has ended: the machine was booted since, or another process has the id."""
    with contextlib.suppress(ProcessLookupError):
        return not leader.is_same(Identity.of(leader.pid))
    # The leader has ended: what remains of the session is ours.
    return not leader.is_of_boot(Identity.of(os.getpid()).boot_id)


def _is_younger(pid: int, leader: Identity) -> bool:
    try:
        return not Identity.of(pid).began_before(leader)
    except ProcessLookupError:
        return False
