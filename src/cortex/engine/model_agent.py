"""Keeps this machine's model agent running while it is needed.

The agent is a detached process, adopted by a later operator. The operator holds a connection to it open, which ends as
soon as the agent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

from cortex import __version__
from cortex.engine.local import replica_environ
from cortex.errors import EngineError
from cortex.home import Home, write_private
from cortex.processes.backoff import Backoff
from cortex.processes.daemon import Daemon, output_tail
from cortex.processes.identity import Identity
from cortex.processes.sockets import peer_of
from cortex.telemetry import Logger

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
#: An agent that ends sooner counts as a failed start.
_SHORT_LIFE_S = 5.0
_BACKOFF = Backoff(0.5, 30.0)
_POLL_S = 0.02
_CHECK_S = 0.5


def model_agent_file(home: Home) -> Path:
    """Return the identity file of a home's model agent."""
    return home.run_dir / "model-agent.json"


class ModelAgent:
    """The model agent of one home. `startup`, then `run` as a task, then `shutdown`, which leaves it running."""

    def __init__(self, home: Home, environ: Mapping[str, str], logger: Logger) -> None:
        self._home = home
        self._command = [sys.executable, "-P", "-m", "cortex.models.agent.agent", str(home.path)]
        self._command += [__version__, sys.prefix]
        # Fewer malloc arenas: the memory of a listing or a download returns to the system.
        self._environ = {"MALLOC_ARENA_MAX": "2", **replica_environ(environ)}
        self._logger = logger
        self._daemon = Daemon(model_agent_file(home))
        self._output = home.run_dir / "model-agent.output"
        self._needed: Callable[[], bool] = lambda: False
        self._apis: Callable[[], Collection[str]] | None = None
        self._written: list[str] | None = None  #: names in the file
        self._connection: tuple[StreamReader, StreamWriter] | None = None
        self._started_at = 0.0
        self._failures = 0
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The agent's process id while it runs."""
        return self._daemon.pid if self._daemon.is_alive() else None

    def describe(self) -> dict[str, Any] | None:
        """Return the agent's process, and the version and environment of its cortex as its command line states them."""
        if (pid := self.pid) is None:
            return None
        words: list[str] = []
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(pid).cmdline()[len(self._command) - 2 :]
        version, environment = words if len(words) == 2 else ("", "")  # noqa: PLR2004 - older versions state nothing
        return {"pid": pid, "version": version, "environment": environment}

    async def startup(self, needed: Callable[[], bool], apis: Callable[[], Collection[str]] | None = None) -> None:
        """Adopt a running agent. Start one if `needed`, which is called again at any time, returns True.

        `apis` returns the deployed APIs with models, whose contents the agent keeps while they have no replicas.
        """
        self._needed, self._apis = needed, apis
        self._write_apis()
        self._daemon.adopt()
        if needed():
            await self._try_to_run()

    async def run(self) -> None:
        """Keep the agent running while it is needed. It ends by itself some time after its last client."""
        while True:
            self._write_apis()
            if not self._needed():
                self._disconnect()
                await asyncio.sleep(_CHECK_S)
            elif self._connection is None and not await self._try_to_run():
                await asyncio.sleep(_BACKOFF.delay_s(self._failures))
            elif self._connection is not None and await self._connection_ended():
                self._disconnect()

    async def shutdown(self) -> None:
        """Leave the agent running and stop watching it."""
        self._disconnect()

    async def ensure_running(self) -> None:
        """Return once the agent answers. Start it if necessary. Raises: EngineError."""
        async with self._lock:
            if self._connection is not None and not self._connection[0].at_eof():
                return
            self._disconnect()
            if not await self._connect():
                await self._start_until_answering()

    async def stop(self) -> None:
        """End the agent: by SIGTERM, then by force."""
        async with self._lock:
            self._needed = lambda: False
            self._disconnect()
            if self._daemon.identity is None:
                self._daemon.adopt()
            if self._daemon.pid is not None and self._daemon.is_alive():
                with contextlib.suppress(OSError):
                    os.kill(self._daemon.pid, signal.SIGTERM)
                await self._wait_for_end(STOP_TIMEOUT_S)
                await asyncio.to_thread(self._daemon.kill)
                await self._wait_for_end(STOP_TIMEOUT_S)
                self._logger.info("model agent stopped", pid=self._daemon.pid)
            self._daemon.forget()

    def _write_apis(self) -> None:
        if self._apis is None or (names := sorted(self._apis())) == self._written:
            return
        with contextlib.suppress(OSError):  # the next call tries again
            write_private(self._home.apis_with_models_file, json.dumps(names))
            self._written = names

    async def _start_until_answering(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        is_started = False
        while not await self._connect():
            if not self._daemon.is_alive():  # a dying agent closes its socket a moment before its process ends
                if is_started:
                    output = output_tail(self._output) or "it printed nothing"
                    raise EngineError(f"the model agent ended during startup: {output}")
                is_started = True
                self._started_at = time.monotonic()
                try:
                    self._home.create()  # the folders may have been removed
                    with self._output.open("wb") as output_file:
                        self._daemon.start(self._command, output=output_file, env=self._environ)
                except OSError as error:
                    raise EngineError(f"the model agent can't be started: {error}") from error
                self._logger.info("model agent started", pid=self._daemon.pid)
            if time.monotonic() > deadline:
                self._daemon.kill()
                raise EngineError(f"the model agent did not answer within {START_TIMEOUT_S:g} s and was killed")
            await asyncio.sleep(_POLL_S)

    async def _connect(self) -> bool:
        try:
            self._connection = await asyncio.open_unix_connection(str(self._home.model_agent_socket))
        except OSError:
            return False
        if not self._daemon.is_alive():  # started by another operator, which ended before it wrote the identity file
            peer = peer_of(self._connection[1].get_extra_info("socket"))
            with contextlib.suppress(OSError):
                self._daemon.adopt(Identity.of(peer.pid) if peer is not None else None)
        return True

    async def _try_to_run(self) -> bool:
        try:
            await self.ensure_running()
            return True
        except EngineError as error:
            self._failures += 1
            self._logger.error("model agent can't be kept running", reason=error)
            return False

    async def _connection_ended(self) -> bool:
        """Wait a moment for the end of the connection; return whether it has ended."""
        assert self._connection is not None
        try:
            # The agent sends nothing without a request: a read returns only at the end of the connection.
            async with asyncio.timeout(_CHECK_S):
                await self._connection[0].read()
        except TimeoutError:
            if time.monotonic() - self._started_at > _SHORT_LIFE_S:
                self._failures = 0
            return False
        except OSError:
            pass
        self._logger.warning("model agent died, starting it again", pid=self._daemon.pid)
        self._failures += time.monotonic() - self._started_at < _SHORT_LIFE_S
        if self._failures > 1:
            await asyncio.sleep(_BACKOFF.delay_s(self._failures))
        return True

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    async def _wait_for_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._daemon.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
