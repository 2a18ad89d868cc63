"""The process of a command: its environment, its start, the address at which it listens, and its end.

Whatever else listens at the port gets no connection: an address is that of the command while one of its processes holds
the socket that listens there. A unix socket needs no check, because only this user can create it in its folder.

It leads a process group of its own, and ends with the worker that started it, even if that is killed. The worker adopts
the processes that leave the group, so that they end with the command, too; if it is killed, its supervisor adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import random
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Template

from cortex.errors import UserError
from cortex.processes.orphans import adopt_orphans, end_with_parent
from cortex.processes.process_tree import (
    descendants,
    end_group,
    exit_status,
    has_memory,
    is_cleaner,
    is_running,
    kill_group,
)
from cortex.worker.commands.socket_table import SocketTable, holds, is_held_by
from cortex.worker.commands.upstream import Address
from cortex.worker.spec import ReplicaSpec

#: Time between SIGTERM and SIGKILL.
STOP_S = 3.5
#: Interval at which adopted processes that have ended are reaped, and at which a stop looks for those that have not.
_REAP_S = 1.0
_STOP_CHECK_S = 0.02
#: Ports for servers, below those that the kernel assigns to connections.
_PORTS = range(20_000, 32_000)
#: Attempts to kill processes that fork as fast as they are killed.
_MAX_KILLS, _KILL_S = 100, 0.002
_HOSTS = ("127.0.0.1", "::1")
#: Folder of the locks of ports, beside the sockets.
PORT_LOCKS = "ports"


def process_environment(environ: Mapping[str, str], spec: ReplicaSpec, index: int, port: int) -> dict[str, str]:
    """Return the environment of a command: programs of the project's Python environment are on its PATH."""
    programs = str(Path(spec.python).parent)
    return {
        "PYTHONUNBUFFERED": "1",  # else lines of Python servers reach the log late
        **environ,
        "PATH": os.pathsep.join(filter(None, [programs, environ.get("PATH", os.defpath)])),
        "CORTEX_SOCKET": spec.command_sockets[index],
        "CORTEX_ENDPOINT": spec.endpoint,
        "PORT": str(port),
    }


def expand(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Replace `$NAME` and `${NAME}` by variables of the environment; `$$` is a dollar sign."""
    return [Template(part).safe_substitute(environ) for part in command]


class CommandProcess:
    """One run of a command."""

    def __init__(self, spec: ReplicaSpec, index: int) -> None:
        self.wait_status: int | None = None  #: of the process, once it has ended
        self.socket_path = spec.command_sockets[index]
        self.port, self._port_lock = reserve_port(Path(self.socket_path).parent / PORT_LOCKS)
        self._sockets = SocketTable()
        self._held: dict[tuple[str, int], int] = {}  #: inodes of the sockets that its processes hold
        environ = process_environment(os.environ, spec, index, self.port)
        self.arguments = expand(spec.command, environ)
        self._environ = environ
        self._ended = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        assert self._process is not None
        return self._process.pid

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the process. Raises: UserError."""
        Path(self.socket_path).unlink(missing_ok=True)
        adopt_orphans()
        try:
            self._process = subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                env=self._environ,
                process_group=0,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        except OSError as error:
            raise UserError(f"can't run {shlex.quote(self.arguments[0])}: {error.strerror or error}") from None
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._reap, loop)
        loop.call_later(_REAP_S, self._reap_adopted, loop)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._process is not None
        pid, wait_status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self.wait_status = wait_status
            self._process.returncode = os.waitstatus_to_exitcode(wait_status)
            self._ended.set()

    def _reap_adopted(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(_REAP_S, self._reap_adopted, loop)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid == self.pid:
                    return  # `_reap` does it
                os.waitpid(found.si_pid, os.WNOHANG)

    def find_holders(self, connection: socket.socket) -> list[int]:
        """Return the processes of the command that hold the other end of a connection; none if they are not known."""
        inode = self._sockets.find_peer(connection)
        holders = []
        for pid in descendants(os.getpid()) if inode else ():
            with contextlib.suppress(PermissionError):
                if holds(pid, inode):
                    holders.append(pid)
        return holders

    def has_died(self, holders: Sequence[int]) -> bool:
        """Return whether the end of a connection is that of its process, or of the command.

        The kernel frees the memory of a process that ends before it closes its connections. Servers that fork for each
        connection end their processes with 0 after it.
        """
        if self.wait_status is not None or not has_memory(self.pid):
            return True
        return bool(holders) and not any(map(has_memory, holders)) and any(exit_status(pid) != 0 for pid in holders)

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await self._ended.wait()

    async def stop(self) -> None:
        """End the command and its descendants: SIGTERM, then SIGKILL."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.ended()
                while any(map(is_running, descendants(os.getpid()))):
                    await asyncio.sleep(_STOP_CHECK_S)
        self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to all processes of its group, and to its other descendants."""
        found = descendants(os.getpid())
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)
        for pid in found:
            with contextlib.suppress(OSError):
                if os.getpgid(pid) != self.pid:
                    os.kill(pid, number)

    def kill(self) -> None:
        """Kill the command and its descendants, also those that are forked meanwhile.

        Those that remove shared memory of the others end by themselves.
        """
        for _ in range(_MAX_KILLS):
            kill_group(self.pid)
            living = [pid for pid in descendants(os.getpid()) if is_running(pid) and not is_cleaner(pid)]
            for pid in living:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not living:
                end_group(self.pid)
                return
            time.sleep(_KILL_S)

    def find_address(self) -> Address | None:
        """Return the address at which the server accepts connections; None if there is none."""
        if _accepts(self.socket_path):
            return self.socket_path
        return next(filter(self.listens_at, ((host, self.port) for host in _HOSTS)), None)

    def listens_at(self, address: tuple[str, int]) -> bool:
        """Return whether it is the command that listens at an address."""
        found = self._sockets.find(*address)
        if found is None or not is_held_by(found, descendants(os.getpid())):
            self._held.pop(address, None)
            return False
        self._held[address] = found.inode
        return True

    def still_listens_at(self, address: Address) -> bool:
        """Return whether the command has listened at an address ever since it was found there; it is cheap.

        So a connection that was made meanwhile leads to the command.
        """
        if isinstance(address, str):
            return True
        found = self._sockets.find(*address)
        return found is not None and self._held.get(address) == found.inode

    def why_no_address(self) -> str:
        """Return that there is no address, and what may be the reason."""
        return f"{self.no_address}{self.find_mistake()}"

    @property
    def no_address(self) -> str:
        """Return that there is no address."""
        return f"it listens neither at the port $PORT ({self.port}) nor at the unix socket $CORTEX_SOCKET"

    def find_mistake(self) -> str:
        """Return the addresses at which processes of the command listen instead, or others at its port; else ""."""
        if others := self._find_other_ports():
            return f"; it listens at {', '.join(others)}: pass it the port, such as --port $PORT"
        found = [host for host in _HOSTS if self._sockets.find(host, self.port)]
        strangers = [host for host in found if not self.listens_at((host, self.port))]
        return f"; a program that it did not start listens there, at {' and '.join(strangers)}" if strangers else ""

    def _find_other_ports(self) -> list[str]:
        """Return the TCP addresses of its processes that are others."""
        import psutil  # noqa: PLC0415 - for an error message only

        found: set[str] = set()
        for pid in descendants(os.getpid()):
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)  # that of the project, which may be older
                connections = getattr(process, "net_connections", None) or process.connections
                for connection in connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port != self.port:
                        found.add(f"{connection.laddr.ip}:{connection.laddr.port}")
        return sorted(found)


def reserve_port(locks: Path) -> tuple[int, int]:
    """Return a free port of the loopback interface, and the descriptor that keeps other workers from choosing it.

    `locks` is a private folder with a file per port: whoever knows a port can listen there first. Raises: UserError.
    """
    locks.mkdir(mode=0o700, exist_ok=True)
    for port in random.sample(_PORTS, min(len(_PORTS), 200)):
        lock = os.open(locks / str(port), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for host in _HOSTS:
                _check_free(host, port)
        except OSError:
            os.close(lock)
            continue
        return port, lock
    raise UserError(f"no port between {_PORTS.start} and {_PORTS.stop} is free")


def _check_free(host: str, port: int) -> None:
    """Check that no process listens on a port. Raises: OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return  # a machine without IPv6
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise


def _accepts(path: str) -> bool:
    """Return whether a server listens at a unix socket, without waiting for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except BlockingIOError:
            pass  # its backlog is full
        except OSError:
            return False
    return True
