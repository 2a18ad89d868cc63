"""Start supervisors by forking zygotes, one per interpreter; `supervisor/zygote.py` is their process."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from cortex.processes.daemon import start_detached
from cortex.processes.identity import Identity
from cortex.processes.jsonl import encode

#: A zygote that was just started first imports its modules, which takes long on a busy machine.
_TIMEOUT_S = 10.0
#: Beginnings of the names of variables that count when an interpreter or one of its libraries starts.
_STARTUP_VARIABLES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OPENSSL_", "LC_", "LANG", "HOME")


@dataclass(frozen=True)
class _Zygote:
    process: subprocess.Popen[bytes]
    channel: socket.socket


class Zygotes:
    """The zygotes of one engine. `environ` is the environment that they are started with."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._running: dict[str, _Zygote] = {}

    def shutdown(self) -> None:
        """End all zygotes; their supervisors keep running."""
        for python in list(self._running):
            self._end(python)

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
        python = command[0]
        if _startup_variables(env) != _startup_variables(self._environ):
            return False
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            try:
                zygote = self.start(python)
                socket.send_fds(zygote.channel, [b"f"], [theirs.fileno(), output.fileno()])
                theirs.close()
                async with asyncio.timeout(_TIMEOUT_S):
                    loop = asyncio.get_running_loop()
                    await loop.sock_sendall(ours, encode({"command": command, "cwd": cwd, "env": dict(env)}))
                    pid = int(await loop.sock_recv(ours, 32))
                record(Identity.of(pid))
                ours.send(b"r")
            except (OSError, ValueError):
                self._end(python)
                return False
        return True

    def start(self, python: str) -> _Zygote:
        """Start the zygote of an interpreter, unless it runs. Raises: OSError."""
        if python not in self._running:
            channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            command = [python, "-P", "-m", "cortex.supervisor.zygote"]
            with theirs, open(os.devnull, "wb") as null:  # noqa: PTH123
                process = start_detached(command, output=null, input_=theirs.fileno(), cwd="/", env=self._environ)
            channel.setblocking(False)
            self._running[python] = _Zygote(process, channel)
            asyncio.get_running_loop().add_reader(channel, self._end, python)  # it sends nothing, so it has ended
        return self._running[python]

    def _end(self, python: str) -> None:
        zygote = self._running.pop(python, None)
        if zygote is not None:
            asyncio.get_running_loop().remove_reader(zygote.channel)
            zygote.channel.close()
            zygote.process.kill()
            zygote.process.wait()


def _startup_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_STARTUP_VARIABLES)}
