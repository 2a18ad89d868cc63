"""Start supervisors by forking zygotes, one per interpreter; `supervisor/zygote.py` is their process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from cortex.processes.daemon import start_detached
from cortex.processes.identity import Identity
from cortex.processes.jsonl import encode

#: A zygote first imports its modules, which takes long on a busy machine. Then a fork takes a few milliseconds.
_IMPORT_TIMEOUT_S = 10.0
_FORK_TIMEOUT_S = 1.0
_IDLE_S = 600.0
#: Beginnings of the names of variables that count when an interpreter or one of its libraries starts.
_STARTUP_VARIABLES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OPENSSL_", "LC_", "LANG", "HOME")


@dataclass(eq=False)
class _Zygote:
    python: str
    process: subprocess.Popen[bytes]
    channel: socket.socket
    has_imported: asyncio.Event  #: also set once it has ended
    idle_timer: asyncio.TimerHandle | None = None


class Zygotes:
    """The zygotes of one engine. `environ` is the environment that they are started with.

    A zygote ends after `idle_s` without a start. One that hangs is replaced.
    """

    def __init__(self, environ: Mapping[str, str], idle_s: float = _IDLE_S) -> None:
        self._environ = environ
        self._idle_s = idle_s
        self._running: dict[str, _Zygote] = {}

    def shutdown(self) -> None:
        """End all zygotes; their supervisors keep running."""
        for zygote in list(self._running.values()):
            self._end(zygote)

    async def fork(
        self,
        command: Sequence[str],
        record: Callable[[Identity], None],
        *,
        output: IO[bytes],
        cwd: str,
        env: Mapping[str, str],
    ) -> bool:
        """Fork a supervisor that is as if it had been started with `command`, whose first word is the interpreter.

        It runs once `record` has returned. Returns False if the caller has to start it: `env` requires an interpreter
        of its own, or forking failed.
        """
        if _startup_variables(env) != _startup_variables(self._environ):
            return False
        try:
            zygote = self.start(command[0])
        except OSError:
            return False
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            try:
                async with asyncio.timeout(_IMPORT_TIMEOUT_S):
                    await zygote.has_imported.wait()
                socket.send_fds(zygote.channel, [b"f"], [theirs.fileno(), output.fileno()])
                theirs.close()
                async with asyncio.timeout(_FORK_TIMEOUT_S):
                    loop = asyncio.get_running_loop()
                    await loop.sock_sendall(ours, encode({"command": command, "cwd": cwd, "env": dict(env)}))
                    pid = int(await loop.sock_recv(ours, 32))
                record(Identity.of(pid))
                ours.send(b"r")
            except (OSError, ValueError) as error:
                self._end(zygote)
                if isinstance(error, TimeoutError):
                    with contextlib.suppress(OSError):
                        self.start(zygote.python)
                return False
        return True

    def start(self, python: str) -> _Zygote:
        """Start the zygote of an interpreter, unless it runs. Raises: OSError."""
        loop = asyncio.get_running_loop()
        zygote = self._running.get(python)
        if zygote is None:
            channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            command = [python, "-P", "-m", "cortex.supervisor.zygote"]
            with theirs, open(os.devnull, "wb") as null:  # noqa: PTH123
                process = start_detached(command, output=null, input_=theirs.fileno(), cwd="/", env=self._environ)
            channel.setblocking(False)
            zygote = self._running[python] = _Zygote(python, process, channel, asyncio.Event())
            loop.add_reader(channel, self._receive, zygote)
        if zygote.idle_timer is not None:
            zygote.idle_timer.cancel()
        zygote.idle_timer = loop.call_later(self._idle_s, self._end, zygote)
        return zygote

    def _receive(self, zygote: _Zygote) -> None:
        """Read the one message of a zygote, that it has imported its modules, or the end of its process."""
        with contextlib.suppress(OSError):
            if zygote.channel.recv(1):
                zygote.has_imported.set()
                return
        self._end(zygote)

    def _end(self, zygote: _Zygote) -> None:
        if self._running.get(zygote.python) is not zygote:
            return
        del self._running[zygote.python]
        asyncio.get_running_loop().remove_reader(zygote.channel)
        if zygote.idle_timer is not None:
            zygote.idle_timer.cancel()
        zygote.channel.close()
        zygote.process.kill()
        zygote.process.wait()
        zygote.has_imported.set()


def _startup_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_STARTUP_VARIABLES)}
