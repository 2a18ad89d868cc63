"""The process of an API, as `cortex dev` sees it: start, connections, hot swaps, end. `dev/process.py` is its code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from cortex.config.schema import Api
from cortex.dev.debugger import TerminalToken
from cortex.dev.link import Link
from cortex.engine.local import user_environ
from cortex.processes.process_tree import is_cleaner
from cortex.supervisor.exit_reasons import count_kernel_oom_kills, name_death
from cortex.worker.spec import DEV_VARIABLE, ReplicaSpec

#: Time for a process to end in order, with its exit hooks, before it is killed.
STOP_S = 2.0


@dataclass(frozen=True)
class DebugSettings:
    """Settings of the debuggers of all processes."""

    token: TerminalToken
    port: int | None = None  #: of debugpy; None: it is not started


@dataclass(frozen=True)
class LoadedFiles:
    """Files of the project that a process uses, relative to it."""

    modules: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()  #: others that it read while it was loading


@dataclass(frozen=True)
class LoadResult:
    """The end of a start or of a swap."""

    kind: str  #: "ready", "swapped", "new_process" (a swap does not suffice), "failed", "outdated" (abandoned)
    message: str = ""  #: of "failed"; the reason of "new_process"
    traceback: str = ""
    names: tuple[str, ...] = ()  #: of swapped functions


class ApiProcess:
    """One process. All methods are for the event loop."""

    def __init__(
        self,
        spec: ReplicaSpec,
        environ: Mapping[str, str],
        debug: DebugSettings,
        on_debugging: Callable[[bool], object],
        on_files: Callable[[], object],
        on_exit: Callable[[ApiProcess], object],
    ) -> None:
        self.spec = spec
        self.files = LoadedFiles()
        self.signature = ""
        self.is_debugging = False
        self.is_stopping = False
        self.exit_reason = ""  #: once it has ended
        self.requests = 0  #: connections that are open
        self._oom_kills = count_kernel_oom_kills()
        self._environ = environ
        self._debug = debug
        self._on_debugging = on_debugging
        self._on_files = on_files
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._link: Link
        self._process: subprocess.Popen[bytes]
        self._result: asyncio.Future[LoadResult] | None = None
        self.ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    def start(self) -> None:
        """Start the interpreter, which begins to import the libraries of the user's code."""
        self._link, theirs = Link.pair()
        token = self._debug.token
        descriptors = (theirs.sock.fileno(), token.read, token.write)
        # With frozen modules, debuggers of editors miss breakpoints.
        options = ["-X", "frozen_modules=off"] if self._debug.port is not None else []
        command = [self.spec.python, *options, "-m", "cortex.dev.process", *map(str, descriptors)]
        environ = {**self._environ, **self.spec.env}
        # The process inherits this until it ignores Ctrl-C itself: an interpreter that starts would print a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(command, env=environ, pass_fds=descriptors)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.sock.close()  # without a shutdown: the process has the other end
        self._link.send("preload", spec=self.spec.to_json())
        threading.Thread(target=self._receive, name="cortex-dev-link", daemon=True).start()

    async def load(self, spec: ReplicaSpec, api: Api, prefix: str) -> LoadResult:
        """Construct the user's class."""
        self.spec = spec
        self._result = self._loop.create_future()
        self._link.send(
            "load", spec=spec.to_json(), api=api.model_dump_json(), prefix=prefix, debug_port=self._debug.port
        )
        return await self._result

    async def swap(self) -> LoadResult:
        """Replace the functions that have changed on disk."""
        self._result = self._loop.create_future()
        self._link.send("swap")
        return await self._result

    def connect(self) -> socket.socket | None:
        """Return a connection for one request; None if the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            is_sent = self._link.send_connection(theirs)
        if not is_sent:
            ours.close()
            return None
        return ours

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """End the process and everything that it has started."""
        self.is_stopping = True
        children = self._descendants()
        self._link.send("stop")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), timeout_s)
        self._kill([*children, *self._descendants()])
        await self.ended.wait()

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _kill(self, children: list[psutil.Process]) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()
        for child in children:
            with contextlib.suppress(psutil.Error):
                if not is_cleaner(child.pid):  # it ends once the others have ended
                    child.kill()

    # Messages.

    def _receive(self) -> None:
        """Pass messages to the event loop until the process has ended; on a thread of its own."""
        for message, _ in self._link.receive():
            self._loop.call_soon_threadsafe(self._handle, message)
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._end, status)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if "modules" in message:
            self.files = LoadedFiles(frozenset(message["modules"]), frozenset(message["data"]))
        if kind == "debugging":
            self.is_debugging = message["is_active"]
            self._on_debugging(self.is_debugging)
        elif kind == "files":
            self._on_files()
        else:
            self.signature = message.get("signature", self.signature)
            text = message.get("message", message.get("reason", ""))
            self._resolve(LoadResult(kind, text, message.get("traceback", ""), tuple(message.get("names", ()))))

    def _end(self, status: int) -> None:
        if self.is_debugging:
            self.is_debugging = False
            self._debug.token.put_back()
            self._on_debugging(False)
        self.exit_reason = name_death(_wait_status(status), count_kernel_oom_kills() - self._oom_kills).message
        self._resolve(LoadResult("failed", f"its process ended: {self.exit_reason}"))
        self._link.close()
        self.ended.set()
        self._on_exit(self)

    def _resolve(self, result: LoadResult) -> None:
        if self._result is not None and not self._result.done():
            self._result.set_result(result)


def _wait_status(return_code: int) -> int:
    """Return the wait status of a return code of `subprocess`."""
    return return_code << 8 if return_code >= 0 else -return_code


def environment_of_processes(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the processes: those that a replica would inherit, and a mark that user code may read."""
    return {**user_environ(environ), DEV_VARIABLE: "1"}
