from __future__ import annotations

from cortex.jobs.spec import BatchFailure, Lease, LeasedBatch
from cortex.replica.jobs.unacknowledged_reports import FLUSH_BYTES, FLUSH_S, ActiveLease, BatchOutcome, ReportQueue


def work(token: str = "a", seqs: range = range(3)) -> ActiveLease:
    return ActiveLease(Lease(token, tuple(LeasedBatch(seq, b"[1]") for seq in seqs)))


def fill(box: ReportQueue, *done: BatchOutcome, now: float = 100.0) -> None:
    for item in done:
        if box.put(item):
            box.note(item, now)


def test_what_is_done_makes_one_report_per_lease_in_order() -> None:
    box, a, b = ReportQueue(), work(), work("b", range(3, 5))
    failure = BatchFailure(1, "ValueError: no", "")
    fill(
        box,
        BatchOutcome(a, 0, 0.5),
        BatchOutcome(a, 1, 9.0, failure),
        BatchOutcome(a, 2, 0.25, None, b"7"),
        BatchOutcome(b, 3, 1.0),
    )
    first, second = box.collect()
    report = first.report()
    assert (report.token, report.upto, report.failures, report.results) == ("a", 2, (failure,), ((2, b"7"),))
    assert report.seconds == 0.75
    assert (first.is_final, second.is_final) == (True, False)
    box.answered([first, second])
    assert box.is_empty
    assert box.waiting_bytes == 0


def test_report_is_due_a_moment_after_the_first_batch_or_once_much_waits() -> None:
    box, a = ReportQueue(), work()
    assert box.due_at is None
    fill(box, BatchOutcome(a, 0, 0.0), now=1.0)
    fill(box, BatchOutcome(a, 1, 0.0), now=1.1)
    assert box.due_at == 1.0 + FLUSH_S
    fill(box, BatchOutcome(a, 2, 0.0, None, b"x" * (FLUSH_BYTES + 1)), now=1.15)
    assert box.due_at == 1.15


def test_unanswered_report_goes_again_alone() -> None:
    box, a = ReportQueue(), work()
    fill(box, BatchOutcome(a, 0, 0.0))
    sent = box.collect()
    box.failed(sent, may_have_arrived=True)
    fill(box, BatchOutcome(a, 1, 0.0))
    again = box.collect()
    assert [(item.upto, item.may_have_arrived) for item in again] == [(0, True)]
    box.answered(again)
    assert [item.upto for item in box.collect()] == [1]


def test_what_was_done_of_a_lost_lease_is_not_reported() -> None:
    box, a = ReportQueue(), work()
    fill(box, BatchOutcome(a, 0, 0.0, None, b"1"))
    a.is_lost = True
    assert box.collect() == []
    assert box.waiting_bytes == 0
    assert box.is_empty


def test_large_results_are_split_among_reports() -> None:
    box, a = ReportQueue(), work(seqs=range(10))
    fill(box, *(BatchOutcome(a, seq, 0.0, None, b"x" * 1024 * 1024) for seq in range(10)))
    uptos = []
    while not box.is_empty:
        outgoing = box.collect()
        uptos += [item.upto for item in outgoing]
        box.answered(outgoing)
    assert uptos == [3, 7, 9]
    assert box.waiting_bytes == 0
