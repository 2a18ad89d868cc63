"""Outcomes of batches that the operator has not acknowledged yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cortex.jobs.spec import BatchFailure, Lease, Report

#: Outcomes are reported after this time at the latest …
FLUSH_S = 0.2
#: … or once this many bytes wait.
FLUSH_BYTES = 1024 * 1024
#: Approximate maximum size of a report body, unless one batch is larger.
_REPORT_BYTES = 4 * 1024 * 1024


@dataclass(eq=False)
class ActiveLease:
    """A lease whose batches are running."""

    lease: Lease
    is_lost: bool = False  #: its remaining batches are skipped

    @property
    def last(self) -> int:
        """Return the number of its last batch."""
        return self.lease.batches[-1].seq


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """Outcome of a batch."""

    work: ActiveLease
    seq: int
    seconds: float
    failure: BatchFailure | None = None
    result: bytes | None = None

    @property
    def size(self) -> int:
        """Return the approximate size in a report, in bytes."""
        size = len(self.failure.error) + len(self.failure.traceback) if self.failure else 0
        return size + len(self.result) if self.result else size


@dataclass
class PendingReport:
    """A report that has not been acknowledged."""

    work: ActiveLease
    upto: int = -1
    failures: list[BatchFailure] = field(default_factory=list)
    results: list[tuple[int, bytes]] = field(default_factory=list)
    seconds: float = 0.0
    size: int = 0
    may_have_arrived: bool = False  #: it was sent before, without a response

    @property
    def is_final(self) -> bool:
        """Return whether it covers the last batch of the lease."""
        return self.upto == self.work.last

    def add(self, done: BatchOutcome) -> None:
        """Add the outcome of the next batch of the lease."""
        self.upto = done.seq
        self.size += done.size
        if done.failure is not None:
            self.failures.append(done.failure)
        else:
            self.seconds += done.seconds
        if done.result is not None:
            self.results.append((done.seq, done.result))

    def report(self) -> Report:
        """Return the report to send."""
        token = self.work.lease.token
        return Report(token, self.upto, tuple(self.failures), tuple(self.results), self.seconds)


class ReportQueue:
    """Queue of outcomes from the main thread to the reporting one; all methods except `put` need their common lock."""

    def __init__(self) -> None:
        self.unanswered: list[PendingReport] = []  #: sent, without a response
        self.waiting_bytes = 0  #: size of all unacknowledged outcomes
        self._done: deque[BatchOutcome] = deque()
        self._is_noted = False
        self._flush_at = 0.0

    def put(self, done: BatchOutcome) -> bool:
        """Add an outcome; return whether `note` must be called for it."""
        self._done.append(done)
        return not self._is_noted or done.failure is not None or done.result is not None

    def note(self, done: BatchOutcome, now: float) -> bool:
        """Schedule the report of an added outcome; return whether the time of the next report has changed."""
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
        """Return when the next report is due; None if no outcome waits."""
        return self._flush_at if self._is_noted else None

    @property
    def is_empty(self) -> bool:
        """Return whether every outcome has been acknowledged."""
        return not (self._done or self.unanswered or self._is_noted)

    def collect(self) -> list[PendingReport]:
        """Return the reports to send next.

        Reports that may have arrived before are sent alone, so that the response shows whether they did.
        """
        if self.unanswered:
            return self.unanswered
        self._is_noted = False  # first: outcomes added from here on call `note` again
        outgoing: list[PendingReport] = []
        size = 0
        while self._done and size < _REPORT_BYTES:
            done = self._done.popleft()
            if done.work.is_lost:
                self.waiting_bytes -= done.size
                continue
            if not outgoing or outgoing[-1].work is not done.work:
                outgoing.append(PendingReport(done.work))
            outgoing[-1].add(done)
            size += done.size
        if self._done:
            self._is_noted, self._flush_at = True, 0.0
        return outgoing

    def failed(self, outgoing: list[PendingReport], may_have_arrived: bool) -> None:
        """Keep reports without a response, to send them again."""
        for item in outgoing:
            item.may_have_arrived |= may_have_arrived
        self.unanswered = outgoing

    def answered(self, outgoing: list[PendingReport]) -> None:
        """Remove acknowledged reports."""
        self.unanswered = []
        self.waiting_bytes -= sum(item.size for item in outgoing)
