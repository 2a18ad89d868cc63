"""One of several operators with one PostgreSQL database leads, the others stand by. Knows nothing of what leaders do.

Whoever loses the lead is told, and should then end and begin anew as one that stands by: what is in its memory is of
the past. That it writes nothing meanwhile is the databases' doing, which are opened with the epoch of the lead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

from cortex.state.circuit_breaker import DatabaseAwayError
from cortex.state.leader_election import ANSWER_S, SESSION_S, Leader, Seat
from cortex.state.postgresql import DatabaseAddressError
from cortex.telemetry import Logger


@dataclass(frozen=True)
class Timing:
    """In seconds; tests are faster. The server must keep the lock (`session_s`) for longer than `held_s`."""

    look_s: float = 0.5  #: between two attempts to take the lead
    check_s: float = 2.0  #: between two looks whether it is still there
    answer_s: float = ANSWER_S
    held_s: float = 5.0  #: after a check that was answered, the lead counts as held
    session_s: float = SESSION_S  #: without a word of ours, the server keeps the lock


class Leadership:
    """The lead of one database. All methods belong to one event loop.

    A server that is started again does not end the lead, if it is back within `held_s` and nobody else was faster.
    """

    def __init__(self, url: str, me: Leader, logger: Logger, timing: Timing = Timing()) -> None:  # noqa: B008 - frozen
        self._seat = Seat(url, timing.session_s, timing.answer_s)
        self._me = me
        self._logger = logger
        self._timing = timing
        self._epoch = 0
        self._held_until = 0.0
        self._ended = threading.Event()
        self._changed = asyncio.Event()
        self._keeper: threading.Thread | None = None
        #: Who leads, as far as is known; one that stands by answers with it.
        self.leader: Leader | None = None
        self.problem = ""  #: why that is not known, where the database is the reason

    @property
    def has_lead(self) -> bool:
        """Whether this operator is the one that leads, or did last."""
        return self._epoch > 0

    async def acquire(self, is_patient: bool = False) -> int:
        """Wait until this operator leads; return the epoch to open the databases with.

        `is_patient`: a database that can't be reached is waited for, too. Raises: DatabaseAddressError.
        """
        told = ""
        is_prepared = False
        while True:
            asked_at = time.monotonic()
            try:
                if not is_prepared:
                    await asyncio.to_thread(self._seat.prepare)
                    is_prepared = True
                epoch = await asyncio.to_thread(self._seat.take, self._me)
                if epoch is not None:
                    return self._begin(epoch, asked_at)
                self.leader = await asyncio.to_thread(self._seat.who)
                self.problem = ""
                message, why = "standing by: another operator leads", str(self.leader)
            except (DatabaseAwayError, DatabaseAddressError) as error:
                if not is_patient and not is_prepared:
                    raise
                self.leader, self.problem = None, str(error)
                message, why = "standing by: the database can't be reached", str(error)
            if message != told:
                self._logger.info(message, leader=why)
                told = message
            await asyncio.sleep(self._timing.look_s)

    async def lost(self) -> None:
        """Return as soon as this operator does not lead any more, or can't know it."""
        while not self._ended.is_set():
            left = self._held_until - time.monotonic()
            if left <= 0:
                self._logger.error("the lead is lost: the database does not answer", epoch=self._epoch)
                self._ended.set()
                break
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def release(self) -> None:
        """Give up the lead, so that another can take it at once."""
        self._ended.set()
        self._changed.set()
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.join)
        await asyncio.to_thread(self._seat.leave)

    def _begin(self, epoch: int, asked_at: float) -> int:
        self._epoch = epoch
        self.leader = self._me
        self._held_until = asked_at + self._timing.held_s
        self._logger.info("this operator leads", epoch=epoch)
        loop = asyncio.get_running_loop()
        self._keeper = threading.Thread(target=self._keep, args=(loop,), name="leadership", daemon=True)
        self._keeper.start()
        return epoch

    def _keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look again and again, on a thread of its own: neither may the loop's work delay a look, nor a look that."""
        pause = self._timing.check_s
        while not self._ended.wait(pause):
            asked_at = time.monotonic()
            try:
                if not self._seat.keep(self._epoch):
                    self._logger.error("the lead is lost: another operator took it", epoch=self._epoch)
                    self._ended.set()
                    loop.call_soon_threadsafe(self._changed.set)
                    return
                self._held_until = asked_at + self._timing.held_s
                pause = self._timing.check_s
            except DatabaseAwayError as error:
                if pause == self._timing.check_s:
                    self._logger.warning("the database does not answer", error=error)
                pause = self._timing.check_s / 10
