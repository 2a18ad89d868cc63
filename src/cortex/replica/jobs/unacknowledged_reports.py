"""What a worker has done and the operator does not know yet. It knows nothing of threads and sockets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cortex.jobs.spec import BatchFailure, Lease, Report

#: What is done is reported after so long at the latest.
FLUSH_S = 0.2
#: … and once so many bytes wait.
FLUSH_BYTES = 1024 * 1024
#: One body holds about so much, or one batch's.
_REPORT_BYTES = 4 * 1024 * 1024


@dataclass(eq=False)
class Work:
    """A lease that is worked through."""

    lease: Lease
    is_lost: bool = False  #: what is not done need not be done

    @property
    def last(self) -> int:
        """Return the number of its last batch."""
        return self.lease.batches[-1].seq


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one batch."""

    work: Work
    seq: int
    seconds: float
    failure: BatchFailure | None = None
    result: bytes | None = None

    @property
    def size(self) -> int:
        """Return about how many bytes it takes to tell, beyond next to none."""
        told = len(self.failure.error) + len(self.failure.traceback) if self.failure else 0
        return told + len(self.result) if self.result else told


@dataclass
class Outgoing:
    """A report on its way."""

    work: Work
    upto: int = -1
    failures: list[BatchFailure] = field(default_factory=list)
    results: list[tuple[int, bytes]] = field(default_factory=list)
    seconds: float = 0.0
    size: int = 0
    may_have_arrived: bool = False  #: it was sent before, and nobody answered

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing of the lease is left after it."""
        return self.upto == self.work.last

    def add(self, done: Done) -> None:
        """Add the next batch of the same lease."""
        self.upto = done.seq
        self.size += done.size
        if done.failure is not None:
            self.failures.append(done.failure)
        else:
            self.seconds += done.seconds
        if done.result is not None:
            self.results.append((done.seq, done.result))

    def report(self) -> Report:
        """Return what is sent."""
        token = self.work.lease.token
        return Report(token, self.upto, tuple(self.failures), tuple(self.results), self.seconds)


class Outbox:
    """Filled by the thread that works, emptied by the one that reports; all but `put` needs a lock that both share."""

    def __init__(self) -> None:
        self.unanswered: list[Outgoing] = []  #: sent, but nobody answered
        self.waiting_bytes = 0  #: of what was put and is not acknowledged
        self._done: deque[Done] = deque()
        self._is_noted = False
        self._flush_at = 0.0

    def put(self, done: Done) -> bool:
        """Take what is done; tells whether `note` must be called for it."""
        self._done.append(done)
        return not self._is_noted or done.failure is not None or done.result is not None

    def note(self, done: Done, now: float) -> bool:
        """See to it that what was put is reported in time; tells whether that time has changed."""
        self.waiting_bytes += done.size
        if not self._is_noted:
            self._is_noted = True
            self._flush_at = now + FLUSH_S
        elif self.waiting_bytes <= FLUSH_BYTES:
            return False
        if self.waiting_bytes > FLUSH_BYTES:
            self._flush_at = now
        return True

    @property
    def due_at(self) -> float | None:
        """Return when what waits has to be reported; None if nothing waits."""
        return self._flush_at if self._is_noted else None

    @property
    def is_empty(self) -> bool:
        """Tell whether the operator knows everything."""
        return not (self._done or self.unanswered or self._is_noted)

    def collect(self) -> list[Outgoing]:
        """Take what is to be sent next.

        What may have arrived before goes alone: only so the answer says what became of it.
        """
        if self.unanswered:
            return self.unanswered
        self._is_noted = False  # first: what is put from here on is noted anew
        outgoing: list[Outgoing] = []
        size = 0
        while self._done and size < _REPORT_BYTES:
            done = self._done.popleft()
            if done.work.is_lost:
                self.waiting_bytes -= done.size
                continue
            if not outgoing or outgoing[-1].work is not done.work:
                outgoing.append(Outgoing(done.work))
            outgoing[-1].add(done)
            size += done.size
        if self._done:
            self._is_noted, self._flush_at = True, 0.0
        return outgoing

    def failed(self, outgoing: list[Outgoing], may_have_arrived: bool) -> None:
        """Learn that there was no answer."""
        for item in outgoing:
            item.may_have_arrived |= may_have_arrived
        self.unanswered = outgoing

    def answered(self, outgoing: list[Outgoing]) -> None:
        """Learn that there was one."""
        self.unanswered = []
        self.waiting_bytes -= sum(item.size for item in outgoing)
