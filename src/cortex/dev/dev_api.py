"""One API of a project in `cortex dev`: its process, the one prepared for the next restart, and its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from cortex.config.schema import Api
from cortex.dev.api_process import ApiProcess, DebugSettings, LoadedFiles, LoadResult
from cortex.dev.http_gateway import UnavailableError
from cortex.payloads.signature import parse_signature
from cortex.processes.backoff import Backoff
from cortex.worker.spec import ReplicaSpec

if TYPE_CHECKING:
    from cortex.dev.session import DevSession

#: Time for the requests of a process that was replaced; longer while a debugger runs.
_DRAIN_S = 30.0
#: The next process is prepared once the current one has been ready for this long.
_STANDBY_DELAY_S = 0.2
_EXIT_POLL_S = 0.01
#: A connection that a process closes without an answer waits this long for the end of the process.
_EXIT_REASON_S = 1.0
_RESTART_BACKOFF = Backoff(0.1, 5.0)
#: Time to finish for a process that loads when a file changes, if changes have ended the starts before it, too: a
#: server that writes a file of the project at its start would never be ready otherwise.
_ABANDON_BACKOFF = Backoff(1.0, 60.0)
#: A change that follows a start within this time may be its consequence; so many of one file in a row are applied at
#: once.
_REPEAT_S = 1.0
_FREE_REPEATS = 3
_REPEAT_BACKOFF = Backoff(1.0, 60.0)


class DevApi:
    """One API of the project: its process, and the one that is prepared for the next restart."""

    def __init__(self, api: Api, spec: ReplicaSpec, session: DevSession, debug: DebugSettings) -> None:
        self.api = api
        self.spec = spec
        self.failure = ""  #: why no process serves
        self.last_sample = ""  #: response to the sample
        self.is_shown = False  #: the terminal has shown its URL with a command
        self._session = session
        self._debug = debug
        self._current: ApiProcess | None = None
        self._standby: ApiProcess | None = None
        self._standby_timer: asyncio.TimerHandle | None = None
        self._open = asyncio.Event()
        self._owners: dict[socket.socket, ApiProcess] = {}
        self._deaths = 0
        self._loading: ApiProcess | None = None
        self.last_changed = ""  #: the file because of which the server of a command was restarted last
        self._repeats = 0  #: such restarts in a row that the same file caused
        self._loaded_at = 0.0  #: or failed to
        self._failed_files = LoadedFiles()  #: of the last process that failed to start
        self._outdated_by = ""  #: the file whose change ended the last start
        self._abandoned_starts = 0  #: in a row
        self._abandon_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def signature(self) -> str:
        """Return the signature of its methods as JSON; "" if it is not known."""
        return self._current.signature if self._current is not None else ""

    @property
    def has_routes(self) -> bool | None:
        """Return whether methods of its class answer paths below the endpoint; None while no process serves."""
        if self._current is None:
            return None
        return bool(self.signature) and bool(parse_signature(self.signature).routes)

    @property
    def modules(self) -> frozenset[str]:
        """Return the project's modules that the process has loaded, relative to it."""
        return self._files.modules

    @property
    def data(self) -> frozenset[str]:
        """Return the other files of the project that the process read while it was loading."""
        return self._files.data

    @property
    def _files(self) -> LoadedFiles:
        return self._current.files if self._current is not None else self._failed_files

    @property
    def is_serving(self) -> bool:
        """Return whether a process serves."""
        return self._current is not None

    # Requests.

    async def connect(self) -> socket.socket:
        """Return a connection for one request; wait while the API is reloaded. Raises: UnavailableError.

        Like a request that waits for a replica, this one waits for
        `networking.timeout`; longer while a debugger runs.
        """
        while True:
            await self._wait_until_open()
            process = self._current
            if process is None:
                raise UnavailableError(f"{self.api.name} does not run: {self.failure}")
            connection = process.connect()
            if connection is not None:
                process.requests += 1
                self._owners[connection] = process
                return connection
            await asyncio.sleep(_EXIT_POLL_S)  # it has ended; `_on_exit` follows

    async def _wait_until_open(self) -> None:
        timeout_s = self.api.networking.timeout_s
        while not self._open.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._open.wait(), timeout_s)
                return
            if not self._session.terminal.is_debugging:
                what = "it was not ready" if self._current is None else "a change was not applied"
                reason = f" ({self.failure})" if self.failure else ""
                raise UnavailableError(
                    f"{self.api.name} is still loading: {what} within {timeout_s:g} s, its networking.timeout{reason}"
                )

    async def exit_reason(self, connection: socket.socket) -> str:
        """Return why the process of a connection ended on its own; "" if it is not known in time, or goes on."""
        process = self._owners[connection]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.ended.wait(), _EXIT_REASON_S)
        return "" if process.is_stopping else process.exit_reason

    def disconnect(self, connection: socket.socket) -> None:
        """Note that a request has ended."""
        process = self._owners.pop(connection)
        process.requests -= 1

    def hold(self) -> None:
        """Hold requests until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Forward requests again."""
        self._open.set()

    # Changes.

    async def swap(self) -> LoadResult:
        """Replace the functions that have changed; "new_process" if that does not suffice."""
        if self._current is None:
            return LoadResult("new_process", "none was running")
        return await self._current.swap()

    async def restart(self) -> LoadResult:
        """Start a process with the present code; it takes over once it is ready. Otherwise the old one goes on."""
        process = self._loading = self._take_standby() or self._new_process()
        self._outdated_by = ""
        try:
            result = await process.load(self.spec, self.api, self._session.prefix_of(self.api))
        finally:
            self._loading = None
            has_changed = self._abandon_timer is not None
            if self._abandon_timer is not None:
                self._abandon_timer.cancel()
                self._abandon_timer = None
        if self._outdated_by:
            self._in_background(process.stop())
            self._abandoned_starts += 1
            self.failure = self.outdated_reason
            return LoadResult("outdated")
        if not has_changed:
            self._abandoned_starts = 0
        self._loaded_at = time.monotonic()
        if result.kind != "ready":
            self._in_background(process.stop())
            self._failed_files = process.files
            if self._current is None:
                self.failure = result.message
            return result
        old, self._current, self.failure = self._current, process, ""
        if old is not None:
            self._in_background(self._retire(old))
        loop = asyncio.get_running_loop()
        self._standby_timer = loop.call_later(_STANDBY_DELAY_S, self._prepare_standby)
        return result

    def abandon_start(self, file: str) -> None:
        """End a process that loads, because a file has changed meanwhile; not if its user debugs it.

        Each further one in a row gets more time to finish first.
        """
        if self._loading is None or self._abandon_timer is not None:
            return
        delay_s = _ABANDON_BACKOFF.delay_s(self._abandoned_starts) if self._abandoned_starts else 0.0
        self._abandon_timer = asyncio.get_running_loop().call_later(delay_s, self._abandon, self._loading, file)

    def _abandon(self, process: ApiProcess, file: str) -> None:
        self._abandon_timer = None
        if not process.is_debugging:
            self._outdated_by = file
            self._in_background(process.stop(0.0))

    @property
    def is_outdated(self) -> bool:
        """Return whether the last start was abandoned: the next change starts a process in any case."""
        return bool(self._outdated_by)

    @property
    def outdated_reason(self) -> str:
        """Return why the last start was abandoned."""
        return f"{self._outdated_by} changed while it was loading"

    async def stop(self) -> None:
        """End all processes of the API."""
        if self._standby_timer is not None:
            self._standby_timer.cancel()
        processes = [each for each in (self._current, self._standby, self._loading) if each is not None]
        self._current = self._standby = None
        self.failure = "cortex dev ends"
        self.release()
        await asyncio.gather(*(each.stop() for each in processes), *self._tasks, return_exceptions=True)

    def repeat_delay_s(self, file: str) -> float:
        """Return how long the restart because of a changed file waits: it has changed right after the last ones, too.

        A server that writes a file of the project at each start would be restarted without end.
        """
        is_repeated = file == self.last_changed and time.monotonic() - self._loaded_at < _REPEAT_S
        self.last_changed, self._repeats = file, self._repeats + 1 if is_repeated else 0
        return _REPEAT_BACKOFF.delay_s(self._repeats - _FREE_REPEATS) if self._repeats > _FREE_REPEATS else 0.0

    # Processes.

    def _new_process(self) -> ApiProcess:
        session = self._session
        process = ApiProcess(
            self.spec, session.environ, self._debug, session.terminal.set_debugging, session.watch, self._on_exit
        )
        process.start()
        return process

    def _prepare_standby(self) -> None:
        """Start the next process, which imports the libraries of the user's code meanwhile."""
        self._standby_timer = None
        if self._standby is None and self._current is not None:
            self._standby = self._new_process()

    def _take_standby(self) -> ApiProcess | None:
        if self._standby_timer is not None:
            self._standby_timer.cancel()
            self._standby_timer = None
        standby, self._standby = self._standby, None
        if standby is None:
            return None
        if (standby.spec.python, standby.spec.env) == (self.spec.python, self.spec.env) and not standby.ended.is_set():
            return standby
        self._in_background(standby.stop())
        return None

    async def _retire(self, process: ApiProcess) -> None:
        """Stop a process that was replaced, once its requests have ended."""
        deadline = time.monotonic() + _DRAIN_S
        while process.requests and not process.ended.is_set():
            if time.monotonic() > deadline and not process.is_debugging:
                break
            await asyncio.sleep(0.02)
        await process.stop()

    def _on_exit(self, process: ApiProcess) -> None:
        if process is self._standby:
            self._standby = None
        if process is not self._current or process.is_stopping:
            return
        self._current = None
        self._deaths += 1
        self.failure = f"its process ended: {process.exit_reason}"
        self._session.terminal.line(f"{self.api.name}  the process ended: {process.exit_reason}; starting another")
        self.hold()
        self._in_background(self._restart_later(_RESTART_BACKOFF.delay_s(self._deaths)))

    async def _restart_later(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._session.restart_after_exit(self)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
