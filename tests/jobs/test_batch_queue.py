"""Leases, reports and releases of the batch queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, delete, select

from cortex.errors import InputError
from cortex.jobs.batch_queue import LEASE_S, add_hook, exchange
from cortex.jobs.lease_expiry import WorkerDeath, expire, release, renew
from cortex.jobs.records import open_ledger, read_job
from cortex.jobs.spec import HOOK_SEQ, BatchFailure, JobRecord, Lease, LeaseReply, Report
from cortex.lifecycle import JobStatus
from cortex.state.database import Where, open_jobs
from cortex.state.tables import KEYS_PER_JOB, batches, dead_letters, leases, pending
from harness.jobs.job_checks import check_jobs, dump, open_seqs, put_job

NOW = 1000.0
WORKER = ("w", 1)


@pytest.fixture
def connection(where: Where) -> Iterator[Connection]:
    engine = open_jobs(where)
    with engine.begin() as connection:
        yield connection
        check_jobs(connection, has_results=False)
    engine.dispose()


def call_exchange(
    connection: Connection,
    job: str,
    *reports: Report,
    count: int = 10,
    size: int = 10**6,
    now: float = NOW,
    worker: tuple[str, int] = WORKER,
) -> LeaseReply:
    return exchange(connection, job, *worker, reports, count, size, now)


def lease(
    connection: Connection, job: str, count: int = 10, now: float = NOW, worker: tuple[str, int] = WORKER
) -> Lease:
    found = call_exchange(connection, job, count=count, now=now, worker=worker).lease
    assert found is not None
    return found


def seqs(lease: Lease | None) -> list[int] | None:
    return [batch.seq for batch in lease.batches] if lease else None


def failures(*failed: int) -> tuple[BatchFailure, ...]:
    return tuple(BatchFailure(seq, f"ValueError: {seq}", "Traceback …") for seq in failed)


def job_of(connection: Connection, job: str) -> JobRecord:
    record = read_job(connection, job)
    assert record is not None
    return record


def test_the_first_lease_starts_the_job_and_the_last_report_completes_it(connection: Connection) -> None:
    job = put_job(connection, 3, items=2)
    assert job_of(connection, job).status is JobStatus.PENDING
    first = lease(connection, job, count=2)
    assert seqs(first) == [0, 1]
    assert [batch.payload for batch in first.batches] == [b"[0,1]", b"[2,3]"]
    assert (job_of(connection, job).status, job_of(connection, job).started_at) == (JobStatus.RUNNING, NOW)
    second = call_exchange(connection, job, Report(first.token, 1, seconds=0.25))
    assert seqs(second.lease) == [2] and not second.is_done
    assert second.lease is not None
    last = call_exchange(connection, job, Report(second.lease.token, 2, results=((2, b'"x"'),), seconds=0.5))
    assert last == LeaseReply(is_done=True)
    record = job_of(connection, job)
    assert record.status is JobStatus.COMPLETING
    counts = record.counts
    assert (counts.succeeded, counts.succeeded_items, counts.results, counts.open) == (3, 6, 1, 0)
    assert counts.seconds == 0.75


def test_a_lease_of_any_size_writes_one_row(connection: Connection) -> None:
    job = put_job(connection, 1000)
    lease(connection, job, count=400)
    assert [(row.first, row.last) for row in connection.execute(select(pending))] == [(400, 999)]
    assert [(row.next, row.last) for row in connection.execute(select(leases))] == [(0, 399)]


@pytest.mark.parametrize(("size", "expected"), [(1, [0]), (3, [0]), (6, [0, 1]), (8, [0, 1]), (9, [0, 1, 2])])
def test_a_lease_has_at_least_one_batch_and_at_most_the_requested_bytes(
    connection: Connection, size: int, expected: list[int]
) -> None:
    job = put_job(connection, 9)
    assert seqs(call_exchange(connection, job, size=size).lease) == expected


def test_a_request_for_no_batches_only_records_reports(connection: Connection) -> None:
    job = put_job(connection, 2)
    held = lease(connection, job, count=1)
    assert call_exchange(connection, job, Report(held.token, 0), count=0) == LeaseReply()
    assert open_seqs(connection, 1).keys() == {1}


@pytest.mark.parametrize(
    ("status", "is_done"),
    [(JobStatus.STOPPED, True), (JobStatus.TIMED_OUT, True), (None, True)],
)
def test_an_ended_or_unknown_job_leases_no_batches_and_rejects_reports(
    connection: Connection, status: JobStatus | None, is_done: bool
) -> None:
    job = put_job(connection, 2)
    held = lease(connection, job, count=1)
    if status:
        ledger = open_ledger(connection, job)
        assert ledger is not None and ledger.move(status, NOW)
        ledger.save(connection, NOW)
    before = dump(connection)
    answer = call_exchange(connection, job if status else "f" * 16, Report(held.token, 0))
    assert answer == LeaseReply(lost=(held.token,), is_done=is_done)
    assert dump(connection) == before


def test_a_duplicate_report_counts_once(connection: Connection) -> None:
    job = put_job(connection, 5)
    held = lease(connection, job, count=5)
    report = Report(held.token, 2, failures(1), ((0, b"0"), (2, b"2")), seconds=1.0)
    assert call_exchange(connection, job, report, count=0) == LeaseReply()
    before = dump(connection)
    assert call_exchange(connection, job, report, count=0) == LeaseReply()
    assert dump(connection) == before
    # A longer report repeats the earlier one, as after a lost response.
    longer = Report(held.token, 4, failures(1, 3), ((0, b"0"), (2, b"2"), (4, b"4")), seconds=1.0)
    assert call_exchange(connection, job, longer, count=0) == LeaseReply()
    counts = job_of(connection, job).counts
    assert (counts.succeeded, counts.failed_attempts, counts.results) == (3, 2, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda token: Report("feedfeed", 0),
        lambda token: Report(token, 5),
    ],
)
def test_a_report_that_does_not_fit_its_lease_changes_nothing(connection: Connection, make: object) -> None:
    job = put_job(connection, 9)
    held = lease(connection, job, count=5)
    report = make(held.token)  # type: ignore[operator]
    before = dump(connection)
    assert call_exchange(connection, job, report, count=0).lost == (report.token,)
    assert dump(connection) == before


@pytest.mark.parametrize(
    "changed",
    [
        {"failures": failures(2, 1)},
        {"failures": failures(1, 1)},
        {"failures": failures(4)},
        {"results": ((1, b"1"), (1, b"1"))},
        {"results": ((4, b"1"),)},
        {"failures": failures(1), "results": ((1, b"1"),)},
    ],
)
def test_a_contradictory_report_is_rejected(connection: Connection, changed: dict[str, object]) -> None:
    job = put_job(connection, 9)
    held = lease(connection, job, count=5)
    before = dump(connection)
    with pytest.raises(InputError):
        call_exchange(connection, job, Report(held.token, 3, **changed), count=0)  # type: ignore[arg-type]
    assert dump(connection) == before


def test_a_report_for_another_job_is_lost(connection: Connection) -> None:
    one, two = put_job(connection, 2), put_job(connection, 2)
    held = lease(connection, one)
    assert call_exchange(connection, two, Report(held.token, 1), count=0).lost == (held.token,)


def test_a_failed_batch_is_retried_alone_after_its_backoff_and_becomes_a_dead_letter(connection: Connection) -> None:
    job = put_job(connection, 3, items=2)
    held = lease(connection, job)
    answer = call_exchange(connection, job, Report(held.token, 2, failures(0, 1)))
    assert answer == LeaseReply(opens_at=NOW + 1)
    for attempt, now in ((2, NOW + 1), (3, NOW + 10)):
        for seq in (0, 1):
            again = lease(connection, job, now=now)
            assert seqs(again) == [seq]
            answer = call_exchange(connection, job, Report(again.token, seq, failures(seq)), count=0, now=now)
        assert answer.is_done is (attempt == 3)
    record = job_of(connection, job)
    assert record.status is JobStatus.COMPLETING
    counts = record.counts
    assert (counts.succeeded, counts.failed, counts.failed_items, counts.failed_attempts) == (1, 2, 4, 6)
    letter = connection.execute(select(dead_letters).order_by(dead_letters.c.key)).first()
    assert letter is not None
    assert (letter.first_item, letter.items, letter.attempts, letter.failed_at) == (0, 2, 3, NOW + 10)
    assert (letter.error, letter.traceback, letter.payload) == ("ValueError: 0", "Traceback …", b"[0,1]")


def test_isolation_leaves_only_failing_items_as_dead_letters(connection: Connection) -> None:
    job, bad, now = put_job(connection, 2, items=10, max_attempts=2, isolate_failures=True), {3, 17}, NOW
    while not (answer := call_exchange(connection, job, count=1, now=now)).is_done:
        if answer.lease is None:
            now += 60
            continue
        (batch,) = answer.lease.batches
        items = {int(item) for item in batch.payload.strip(b"[]").split(b",")}
        call_exchange(
            connection, job, Report(answer.lease.token, batch.seq, failures(batch.seq) if items & bad else ()), count=0
        )
        check_jobs(connection, has_results=False)
    letters = connection.execute(select(dead_letters).order_by(dead_letters.c.first_item)).all()
    assert [(row.first_item, row.items, row.payload) for row in letters] == [(3, 1, b"[3]"), (17, 1, b"[17]")]
    counts = job_of(connection, job).counts
    assert (counts.items, counts.succeeded_items, counts.failed_items) == (20, 18, 2)
    assert counts.batches == counts.succeeded + 2


def test_a_batch_that_cannot_be_split_becomes_one_dead_letter(connection: Connection) -> None:
    job = put_job(connection, 1, items=2, max_attempts=1, isolate_failures=True)
    connection.execute(batches.update().values(payload=b'{"not": "an array"}'))
    held = lease(connection, job)
    assert call_exchange(connection, job, Report(held.token, 0, failures(0))).is_done
    assert job_of(connection, job).counts.failed == 1


def test_missing_batches_are_an_error(connection: Connection) -> None:
    job = put_job(connection, 3)
    removed = connection.execute(select(batches).order_by(batches.c.key.desc())).first()
    connection.execute(delete(batches).where(batches.c.key == removed.key))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="are incomplete"):
        lease(connection, job)
    connection.execute(batches.insert().values(dict(removed._mapping)))  # type: ignore[union-attr]


def test_a_worker_death_counts_an_attempt_of_the_running_batch_only(connection: Connection) -> None:
    job = put_job(connection, 9)
    held = lease(connection, job, count=5)
    lease(connection, job, count=2)
    call_exchange(connection, job, Report(held.token, 0), count=0)
    assert release(connection, *WORKER, WorkerDeath("segmentation fault", job, 3), NOW) == 2
    ranges = [
        (row.first, row.last, row.attempts, row.not_before)
        for row in connection.execute(select(pending).order_by(pending.c.first))
    ]
    assert ranges == [(1, 2, 0, 0), (3, 3, 1, NOW + 1), (4, 4, 0, 0), (5, 6, 0, 0), (7, 8, 0, 0)]
    assert job_of(connection, job).counts.failed_attempts == 1


def test_a_worker_death_without_a_known_batch_counts_an_attempt_of_the_first_open_one(connection: Connection) -> None:
    job = put_job(connection, 6, max_attempts=1)
    held = lease(connection, job, count=3)
    lease(connection, job, count=3)
    call_exchange(connection, job, Report(held.token, 0), count=0)
    release(connection, *WORKER, WorkerDeath("killed"), NOW)
    letter = connection.execute(select(dead_letters)).one()
    assert (letter.first_item, letter.error) == (1, "the worker's process died: killed")
    assert open_seqs(connection, 1).keys() == {2, 3, 4, 5}


@pytest.mark.parametrize("inside", [("f" * 16, 1), ("0" * 16, 0), ("0" * 16, 99)])
def test_a_batch_whose_lease_the_process_lost_counts_no_attempt(
    connection: Connection, inside: tuple[str, int]
) -> None:
    job = put_job(connection, 3)
    held = lease(connection, job)
    call_exchange(connection, job, Report(held.token, 0), count=0)
    assert release(connection, *WORKER, WorkerDeath("killed", *inside), NOW) == 1
    assert job_of(connection, job).counts.failed_attempts == 0
    assert open_seqs(connection, 1).keys() == {1, 2}


def test_a_job_completes_when_its_last_batch_dies_with_its_worker(connection: Connection) -> None:
    job = put_job(connection, 1, max_attempts=1)
    lease(connection, job)
    release(connection, *WORKER, WorkerDeath("out of memory"), NOW)
    assert job_of(connection, job).status is JobStatus.COMPLETING
    assert job_of(connection, job).counts.failed == 1


@pytest.mark.parametrize(
    ("pid", "ended"),
    [(1, {0}), (None, {0, 1}), (2, {1}), (3, set())],
)
def test_a_release_ends_the_leases_of_one_or_all_processes_of_a_worker(
    connection: Connection, pid: int | None, ended: set[int]
) -> None:
    job = put_job(connection, 3)
    lease(connection, job, count=1, worker=("w", 1))
    lease(connection, job, count=1, worker=("w", 2))
    lease(connection, job, count=1, worker=("other", 1))
    assert release(connection, "w", pid, None, NOW) == len(ended)
    assert {row.first for row in connection.execute(select(pending))} == ended
    assert job_of(connection, job).counts.failed_attempts == 0


def test_a_lease_without_a_renewal_expires_and_counts_an_attempt(connection: Connection) -> None:
    job = put_job(connection, 4)
    kept = lease(connection, job, count=2)
    lost = lease(connection, job, count=2, worker=("dead", 7))
    assert renew(connection, *WORKER, [kept.token, lost.token], NOW + 20) == (lost.token,)
    assert expire(connection, NOW + LEASE_S - 1) == 0
    assert expire(connection, NOW + LEASE_S) == 1
    assert renew(connection, "dead", 7, [lost.token], NOW + LEASE_S) == (lost.token,)
    ranges = [(row.first, row.attempts) for row in connection.execute(select(pending).order_by(pending.c.first))]
    assert ranges == [(2, 1), (3, 0)]


def test_an_expired_lease_counts_no_attempt_if_the_oldest_one_is_renewed(connection: Connection) -> None:
    job = put_job(connection, 4)
    oldest = lease(connection, job, count=2)
    lease(connection, job, count=2)
    renew(connection, *WORKER, [oldest.token], NOW + 20)
    assert expire(connection, NOW + LEASE_S) == 1
    assert job_of(connection, job).counts.failed_attempts == 0


def test_new_batches_are_leased_before_retries(connection: Connection) -> None:
    job = put_job(connection, 4)
    held = lease(connection, job, count=2)
    call_exchange(connection, job, Report(held.token, 1, failures(0)), count=0)
    assert seqs(lease(connection, job, count=5, now=NOW + 100)) == [2, 3]
    assert seqs(lease(connection, job, count=5, now=NOW + 100)) == [0]


def hooked_job(connection: Connection, *failed: int) -> str:
    """Store a job of three batches that are all resolved, some as dead letters, and its hook."""
    job = put_job(connection, 3, max_attempts=1)
    add_hook(connection, job)
    assert call_exchange(connection, job, Report(lease(connection, job).token, 2, failures(*failed))) == LeaseReply(
        is_done=True
    )
    for _ in range(2):  # as the next operator does
        add_hook(connection, job)
    return job


@pytest.mark.parametrize(
    ("failed", "raised", "status", "message", "traceback"),
    [
        ((), False, JobStatus.SUCCEEDED, "", ""),
        ((0, 2), False, JobStatus.COMPLETED_WITH_FAILURES, "2 of 3 batches are dead letters", ""),
        ((0,), True, JobStatus.WORKER_ERROR, f"on_job_complete raised ValueError: {HOOK_SEQ}", "Traceback …"),
    ],
    ids=["succeeded", "with dead letters", "hook raised"],
)
def test_the_completion_hook_is_the_last_range_and_its_report_ends_the_job(
    connection: Connection, failed: tuple[int, ...], raised: bool, status: JobStatus, message: str, traceback: str
) -> None:
    assert HOOK_SEQ == KEYS_PER_JOB - 1
    job = hooked_job(connection, *failed)
    hook = lease(connection, job)
    assert seqs(hook) == [HOOK_SEQ] and hook.is_hook
    assert call_exchange(connection, job).lease is None
    report = Report(
        hook.token, HOOK_SEQ, failures(HOOK_SEQ) if raised else (), ((HOOK_SEQ, b"1"),) if not raised else ()
    )
    assert call_exchange(connection, job, report) == LeaseReply(is_done=True)
    record, before = job_of(connection, job), dump(connection)
    assert (record.status, record.message, record.traceback, record.ended_at) == (status, message, traceback, NOW)
    assert (record.counts.batches, record.counts.failed, record.counts.results) == (3, len(failed), 0)
    assert call_exchange(connection, job, report).lost == (hook.token,)
    add_hook(connection, job)
    assert dump(connection) == before


def test_the_third_death_in_the_completion_hook_ends_the_job(connection: Connection) -> None:
    job = hooked_job(connection, 1)
    lease(connection, job)
    release(connection, "w", 1, WorkerDeath("killed", job, 2), NOW)  # something that a batch left behind
    lease(connection, job)
    release(connection, "w", 1, None, NOW)
    first = lease(connection, job)
    release(connection, "w", 1, WorkerDeath("killed", job, HOOK_SEQ), NOW)
    assert call_exchange(connection, job, Report(first.token, HOOK_SEQ), count=0).lost == (first.token,)
    lease(connection, job)
    expire(connection, NOW + LEASE_S)
    lease(connection, job)
    assert job_of(connection, job).status is JobStatus.COMPLETING
    release(connection, "w", 1, WorkerDeath("segmentation fault", job, HOOK_SEQ), NOW)
    record = job_of(connection, job)
    message = "the worker's process died 3 times in on_job_complete, the last time: segmentation fault"
    assert (record.status, record.message) == (JobStatus.WORKER_ERROR, message)
    assert record.counts.failed_attempts == 1, "that of the batch"
    assert not call_exchange(connection, job).lease
