"""Leader election among the operators of one PostgreSQL database, and the standby server of those that don't lead.

             acquire()                          lost: another leads, or no answer for `valid_s`
    standby ───────────▶ leader (epoch n) ──────────────────────────▶ restart_process() ─▶ standby
       │  SIGTERM            │  SIGTERM
       ▼                     ▼
     exit              release(), exit

The leader holds a session lock in PostgreSQL (`state/queries/leader_election.py`). An operator that loses leadership
replaces its process by a fresh one, because its memory is outdated. Meanwhile it can't write: its databases are opened
with its epoch, and fencing rejects older epochs (`state/fencing.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from cortex.errors import DatabaseAddressError, DatabaseUnreachableError
from cortex.operator.http.operator_server import create_server
from cortex.state.queries.leader_election import ANSWER_S, SESSION_S, LeaderLock, LeaderRecord
from cortex.telemetry import Logger

_RETRY_AFTER_S = "2"
#: Set in the environment of a process that replaces an operator that lost the leadership.
_RESTARTED = "CORTEX_BEGUN_ANEW"


@dataclass(frozen=True)
class ElectionTiming:
    """Intervals of the election; tests use shorter ones. `session_s` must exceed `valid_s`."""

    retry_s: float = 0.5  #: between two attempts to acquire the leadership
    check_s: float = 2.0  #: between two checks that it is still held
    answer_s: float = ANSWER_S  #: timeout of a statement
    valid_s: float = 5.0  #: how long a successful check counts
    session_s: float = SESSION_S  #: how long the server keeps the lock of an idle session


class Leadership:
    """Leadership over one database. Call all methods from one event loop.

    A restart of the database server does not end it, if the server is back within `valid_s` and no other operator was
    faster.
    """

    def __init__(self, url: str, me: LeaderRecord, logger: Logger, timing: ElectionTiming = ElectionTiming()) -> None:  # noqa: B008 - frozen
        self._lock = LeaderLock(url, timing.session_s, timing.answer_s)
        self._me = me
        self._logger = logger
        self._timing = timing
        self._epoch = 0
        self._valid_until = 0.0
        self._ended = threading.Event()
        self._changed = asyncio.Event()
        self._checker: threading.Thread | None = None
        self.leader: LeaderRecord | None = None  #: the current leader, as far as known
        self.problem = ""  #: why the leader is unknown, if the database is the reason

    @property
    def is_acquired(self) -> bool:
        """Return True once this operator has become the leader, even if it has lost the leadership since."""
        return self._epoch > 0

    async def acquire(self, is_patient: bool = False) -> int:
        """Wait until this operator leads; return the epoch to open the databases with.

        `is_patient`: wait for a database that is unreachable from the start. Raises: DatabaseAddressError.
        """
        logged = ""
        is_prepared = False
        while True:
            asked_at = time.monotonic()
            try:
                if not is_prepared:
                    await asyncio.to_thread(self._lock.prepare)
                    is_prepared = True
                epoch = await asyncio.to_thread(self._lock.acquire, self._me)
                if epoch is not None:
                    return self._begin(epoch, asked_at)
                self.leader = await asyncio.to_thread(self._lock.leader)
                self.problem = ""
                message, detail = "standing by: another operator leads", str(self.leader)
            except (DatabaseUnreachableError, DatabaseAddressError) as error:
                if not is_patient and not is_prepared:
                    raise
                self.leader, self.problem = None, str(error)
                message, detail = "standing by: the database can't be reached", str(error)
            if message != logged:
                self._logger.info(message, leader=detail)
                logged = message
            await asyncio.sleep(self._timing.retry_s)

    async def wait_until_lost(self) -> None:
        """Return as soon as this operator is no longer the leader, or can't be sure of it."""
        while not self._ended.is_set():
            left = self._valid_until - time.monotonic()
            if left <= 0:
                self._logger.error("leadership lost: the database does not answer", epoch=self._epoch)
                self._ended.set()
                break
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def release(self) -> None:
        """Release the leadership, so that another operator can acquire it at once."""
        self._ended.set()
        self._changed.set()
        if self._checker is not None:
            await asyncio.to_thread(self._checker.join)
        await asyncio.to_thread(self._lock.release)

    def _begin(self, epoch: int, asked_at: float) -> int:
        self._epoch = epoch
        self.leader = self._me
        self._valid_until = asked_at + self._timing.valid_s
        self._logger.info("this operator leads", epoch=epoch)
        loop = asyncio.get_running_loop()
        self._checker = threading.Thread(target=self._check, args=(loop,), name="leadership", daemon=True)
        self._checker.start()
        return epoch

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check periodically, on a separate thread: a busy event loop must not delay a check, nor a check the loop."""
        pause_s = self._timing.check_s
        while not self._ended.wait(pause_s):
            asked_at = time.monotonic()
            try:
                if not self._lock.confirm(self._epoch):
                    self._logger.error("leadership lost: another operator leads", epoch=self._epoch)
                    self._ended.set()
                    loop.call_soon_threadsafe(self._changed.set)
                    return
                self._valid_until = asked_at + self._timing.valid_s
                pause_s = self._timing.check_s
            except DatabaseUnreachableError as error:
                if pause_s == self._timing.check_s:
                    self._logger.warning("the database does not answer", error=error)
                pause_s = self._timing.check_s / 10


class StandbyApp:
    """ASGI application of an operator that does not lead: 503 with the leader's URL."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        leader = self._leadership.leader
        if scope["path"] == "/livez":
            # Between acquiring the leadership and serving as its leader, report none: clients wait for the latter.
            other = None if leader is None or self._leadership.is_acquired else leader.url
            await JSONResponse({"ok": True, "leads": False, "leader": other})(scope, receive, send)
            return
        reason = f"{leader} leads" if leader else self._leadership.problem or "the leader is not known yet"
        content = {
            "error": f"this operator stands by: {reason}",
            "code": "standby",
            "leader": leader.url if leader else None,
        }
        await JSONResponse(content, 503, {"retry-after": _RETRY_AFTER_S})(scope, receive, send)


async def stand_by(
    leadership: Leadership, listener: socket.socket, tls: ssl.SSLContext | None, is_patient: bool
) -> int | None:
    """Serve `StandbyApp` until this operator leads; return its epoch, or None after SIGTERM or SIGINT.

    `is_patient`: wait for a database that is unreachable from the start. Raises: DatabaseAddressError.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = create_server(StandbyApp(leadership), tls)
    serving = asyncio.create_task(server.serve(sockets=[listener.dup()]), name="serve standby")
    acquiring = asyncio.create_task(leadership.acquire(is_patient), name="acquire leadership")
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([acquiring, stopping], return_when=asyncio.FIRST_COMPLETED)
        return acquiring.result() if acquiring.done() else None
    finally:
        server.should_exit = True
        for task in (acquiring, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def consume_restart_mark() -> bool:
    """Return True if this process replaces an operator that lost the leadership; only the first call does."""
    return os.environ.pop(_RESTARTED, None) is not None


def restart_process() -> NoReturn:
    """Replace this process by a fresh operator. It adopts running replicas; gateway and requests are not affected."""
    os.environ[_RESTARTED] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "cortex.operator.main", *sys.argv[1:]])
