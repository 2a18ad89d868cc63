"""Keeps this machine's model agent running while it is needed; knows nothing of models.

The agent is a process in a session of its own, found again by a later operator. A connection that is held open tells
at once when it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping
from pathlib import Path

from cortex.engine.local import replica_environ
from cortex.errors import EngineError
from cortex.home import Home
from cortex.processes.daemon import kill_session
from cortex.processes.identity import Identity
from cortex.telemetry import Logger

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
#: One that lived shorter failed to start; the next waits longer and longer.
_SHORT_LIFE_S = 5.0
_FIRST_BACK_OFF_S = 0.5
_MAX_BACK_OFF_S = 30.0
_POLL_S = 0.02
_LOOK_S = 0.5
_LAST_WORDS_BYTES = 2000


def model_agent_file(home: Home) -> Path:
    """Return the file that says which process is the agent of a home."""
    return home.run_dir / "model-agent.json"


class ModelAgent:
    """The agent of one home. `startup`, then `run` as a task, then `shutdown`, which leaves it running.

    With `is_node` it is that of a node, which has the operator's list what is in stores.
    """

    def __init__(self, home: Home, environ: Mapping[str, str], logger: Logger, is_node: bool = False) -> None:
        self._home = home
        self._command = [sys.executable, "-P", "-m", "cortex.models.agent", str(home.path)]
        if is_node:
            self._command.append("--node")
        # Fewer arenas: what a listing or a download took goes back to the system.
        self._environ = {"MALLOC_ARENA_MAX": "2", **replica_environ(environ)}
        self._logger = logger
        self._identity_file = model_agent_file(home)
        self._output = home.run_dir / "model-agent.output"
        self._needed: Callable[[], bool] = lambda: False
        self._child: subprocess.Popen[bytes] | None = None
        self._identity: Identity | None = None
        self._connection: tuple[StreamReader, StreamWriter] | None = None
        self._started_at = 0.0
        self._failures = 0
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The agent's process while it runs."""
        return self._identity.pid if self._identity is not None and self._is_alive() else None

    async def startup(self, needed: Callable[[], bool]) -> None:
        """Adopt the agent that runs; start one if it is needed, which `needed` tells at any time."""
        self._needed = needed
        self._identity = Identity.read(self._identity_file)
        if needed():
            await self._try_to_run()

    async def run(self) -> None:
        """Keep it running while it is needed; it ends by itself a while after that."""
        while True:
            if not self._needed():
                self._let_go()
                await asyncio.sleep(_LOOK_S)
            elif self._connection is None and not await self._try_to_run():
                await asyncio.sleep(self._back_off_s())
            elif self._connection is not None and await self._is_gone():
                self._let_go()

    async def shutdown(self) -> None:
        """Leave it running and stop watching it."""
        self._let_go()

    async def ensure_running(self) -> None:
        """Return once it answers, started if need be. Raises: EngineError."""
        async with self._lock:
            if self._connection is not None and not self._connection[0].at_eof():
                return
            self._let_go()
            if await self._connect():
                return
            await self._start_until_answering()

    async def stop(self) -> None:
        """End it: politely, then by force."""
        async with self._lock:
            self._needed = lambda: False
            self._let_go()
            identity = self._identity or Identity.read(self._identity_file)
            if identity is not None and identity.is_alive():
                with contextlib.suppress(OSError):
                    os.kill(identity.pid, signal.SIGTERM)
                await self._ended(STOP_TIMEOUT_S)
                await asyncio.to_thread(kill_session, identity)
                await self._ended(STOP_TIMEOUT_S)
                self._logger.info("model agent stopped", pid=identity.pid)
            self._identity_file.unlink(missing_ok=True)
            self._identity = self._child = None

    def _start(self) -> None:
        self._started_at = time.monotonic()
        try:
            self._home.create()  # somebody may have cleaned up
            with self._output.open("wb") as output:
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environ,
                    start_new_session=True,
                )
            self._identity = Identity.of(self._child.pid)
            part = self._identity_file.with_suffix(".part")
            part.write_text(self._identity.to_json())
            part.rename(self._identity_file)
        except OSError as error:
            raise EngineError(f"the model agent can't be started: {error}") from error
        self._logger.info("model agent started", pid=self._child.pid)

    async def _start_until_answering(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        is_started = False
        while not await self._connect():
            if not self._is_alive():  # one that dies closes its socket a moment before its process is gone
                if is_started:
                    raise EngineError(f"the model agent ended at its start: {self._last_words()}")
                self._start()
                is_started = True
            if time.monotonic() > deadline:
                self._kill()
                raise EngineError(f"the model agent did not answer within {START_TIMEOUT_S:g} s; it was killed")
            await asyncio.sleep(_POLL_S)

    async def _connect(self) -> bool:
        try:
            self._connection = await asyncio.open_unix_connection(str(self._home.model_agent_socket))
        except OSError:
            return False
        if not self._is_alive():  # another operator started it, and had no time to write that down
            self._child, self._identity = None, _identity_of_peer(self._connection[1])
        return True

    async def _try_to_run(self) -> bool:
        try:
            await self.ensure_running()
            return True
        except EngineError as error:
            self._failures += 1
            self._logger.error("model agent can't be kept running", reason=error)
            return False

    async def _is_gone(self) -> bool:
        """Look whether the connection has ended, for a moment."""
        assert self._connection is not None
        try:
            # The agent says nothing to who asks nothing: a read ends with the connection.
            async with asyncio.timeout(_LOOK_S):
                await self._connection[0].read()
        except TimeoutError:
            if time.monotonic() - self._started_at > _SHORT_LIFE_S:
                self._failures = 0
            return False
        except OSError:
            pass
        self._logger.warning("model agent died, starting it again", pid=self._identity.pid if self._identity else None)
        self._failures += time.monotonic() - self._started_at < _SHORT_LIFE_S
        if self._failures > 1:
            await asyncio.sleep(self._back_off_s())
        return True

    def _back_off_s(self) -> float:
        return min(_FIRST_BACK_OFF_S * 2.0 ** min(max(self._failures - 1, 0), 10), _MAX_BACK_OFF_S)

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    def _kill(self) -> None:
        if self._identity is not None:
            kill_session(self._identity)

    def _is_alive(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return self._identity is not None and self._identity.is_alive()

    async def _ended(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def _last_words(self) -> str:
        try:
            return self._output.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace").strip() or "it said nothing"
        except OSError as error:
            return str(error)


def _identity_of_peer(writer: StreamWriter) -> Identity | None:
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    with contextlib.suppress(OSError):
        return Identity.of(struct.unpack("3i", data)[0])
    return None
