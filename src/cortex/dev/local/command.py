"""The server of an API with `type: command` in `cortex dev`: its process, and the proxy before it. Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from cortex.dev.local.api import LocalApi
from cortex.errors import UserError
from cortex.supervisor.exit_reasons import name_death
from cortex.worker.commands.command_process import CommandProcess
from cortex.worker.commands.command_server import FLUSH_S, CommandServer
from cortex.worker.commands.readiness_probe import wait_until_ready
from cortex.worker.spec import ReplicaSpec


class CommandApi(LocalApi):
    """One run of a command. All methods are for the thread of the event loop."""

    def __init__(self, spec: ReplicaSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cortex-"))  #: of the socket at which it may listen
        super().__init__(replace(spec, sockets=(str(self._folder / "socket"),)), loop)
        self._process: CommandProcess
        self._server: CommandServer
        self._end: asyncio.Task[None]

    def load(self) -> None:
        """Start the command, and wait until its server is ready. Raises: UserError."""
        spec, loop = self._context.spec, self._context.loop
        self._process = CommandProcess(spec, 0)
        self._process.start(loop)
        try:
            address = loop.run_until_complete(wait_until_ready(spec, self._process, lambda problem: None))
            if address is None:
                raise UserError(f"the command {self._exit_reason()} before it was ready")
        except BaseException:
            self.close()
            raise
        self._server = CommandServer(self._context, self._process, address)
        self._end = loop.create_task(self._wait_for_end())

    def run(self) -> None:
        """Serve until `stop`, and kill what the command has left behind."""
        super().run()
        self.close()

    def close(self) -> None:
        """Kill what the command has left behind."""
        self._process.signal(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_for_end(self) -> None:
        """End this process when the command ends on its own; `cortex dev` starts another."""
        await self._process.ended()
        if not self._server.is_stopping:
            await asyncio.sleep(FLUSH_S)
            sys.stderr.write(f"the command {self._exit_reason()}\n")
            self.close()
            _end_as(self._process.wait_status or 0)

    def _exit_reason(self) -> str:
        return name_death(self._process.wait_status or 0, 0).message


def _end_as(wait_status: int) -> NoReturn:
    """End this process as the command has ended, whose reason callers and the terminal get."""
    if not os.WIFSIGNALED(wait_status):
        os._exit(os.WEXITSTATUS(wait_status))
    number = os.WTERMSIG(wait_status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has written its own
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
