from __future__ import annotations

from cortex.jobs.spec import BatchFailure, Lease, LeasedBatch
from cortex.worker.jobs.unacknowledged_reports import FLUSH_BYTES, FLUSH_S, ActiveLease, BatchOutcome, ReportQueue


def active_lease(token: str = "a", seqs: range = range(3)) -> ActiveLease:
    return ActiveLease(Lease(token, tuple(LeasedBatch(seq, b"[1]") for seq in seqs)))


def fill(queue: ReportQueue, *done: BatchOutcome, now: float = 100.0) -> None:
    for item in done:
        if queue.put(item):
            queue.note(item, now)


def test_outcomes_are_grouped_into_one_report_per_lease_in_order() -> None:
    queue, a, b = ReportQueue(), active_lease(), active_lease("b", range(3, 5))
    failure = BatchFailure(1, "ValueError: no", "")
    fill(
        queue,
        BatchOutcome(a, 0, 0.5),
        BatchOutcome(a, 1, 9.0, failure),
        BatchOutcome(a, 2, 0.25, None, b"7"),
        BatchOutcome(b, 3, 1.0),
    )
    first, second = queue.collect()
    report = first.report()
    assert (report.token, report.upto, report.failures, report.results) == ("a", 2, (failure,), ((2, b"7"),))
    assert report.seconds == 0.75
    assert (first.is_final, second.is_final) == (True, False)
    queue.answered([first, second])
    assert queue.is_empty
    assert queue.waiting_bytes == 0


def test_a_report_is_due_after_a_delay_or_at_a_size() -> None:
    queue, a = ReportQueue(), active_lease()
    assert queue.due_at is None
    fill(queue, BatchOutcome(a, 0, 0.0), now=1.0)
    fill(queue, BatchOutcome(a, 1, 0.0), now=1.1)
    assert queue.due_at == 1.0 + FLUSH_S
    fill(queue, BatchOutcome(a, 2, 0.0, None, b"x" * (FLUSH_BYTES + 1)), now=1.15)
    assert queue.due_at == 1.15


def test_an_unacknowledged_report_is_resent_unchanged() -> None:
    queue, a = ReportQueue(), active_lease()
    fill(queue, BatchOutcome(a, 0, 0.0))
    sent = queue.collect()
    queue.failed(sent, may_have_arrived=True)
    fill(queue, BatchOutcome(a, 1, 0.0))
    again = queue.collect()
    assert [(item.upto, item.may_have_arrived) for item in again] == [(0, True)]
    queue.answered(again)
    assert [item.upto for item in queue.collect()] == [1]


def test_outcomes_of_a_lost_lease_are_not_reported() -> None:
    queue, a = ReportQueue(), active_lease()
    fill(queue, BatchOutcome(a, 0, 0.0, None, b"1"))
    a.is_lost = True
    assert queue.collect() == []
    assert queue.waiting_bytes == 0
    assert queue.is_empty


def test_large_results_are_split_among_reports() -> None:
    queue, a = ReportQueue(), active_lease(seqs=range(10))
    fill(queue, *(BatchOutcome(a, seq, 0.0, None, b"x" * 1024 * 1024) for seq in range(10)))
    uptos = []
    while not queue.is_empty:
        outgoing = queue.collect()
        uptos += [item.upto for item in outgoing]
        queue.answered(outgoing)
    assert uptos == [3, 7, 9]
    assert queue.waiting_bytes == 0
