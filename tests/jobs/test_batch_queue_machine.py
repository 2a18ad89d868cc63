"""Stateful test of the batch queue: random leases, reports, failures, deaths and restarts keep its invariants."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, Engine, select

from cortex.jobs.batch_queue import LEASE_S, add_hook, exchange
from cortex.jobs.lease_expiry import WorkerDeath, expire, release, renew
from cortex.jobs.records import open_ledger
from cortex.jobs.spec import HOOK_SEQ, BatchFailure, LeaseReply, Report
from cortex.lifecycle import JobStatus
from cortex.state.database import JOB_MIGRATIONS, open_jobs, open_sqlite
from cortex.state.tables import dead_letters, first_key, jobs, results
from harness.jobs.job_checks import check_jobs, dump, open_seqs, put_job
from harness.servers.postgres import Postgres

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.long]

WORKERS = [("one", 11), ("one", 12), ("two", 21), ("three", 31)]

#: (batches, items per batch, maximum attempts, failures are isolated)
SHAPES = st.tuples(st.sampled_from([12, 7, 1]), st.integers(1, 5), st.integers(1, 3), st.booleans())


@dataclass
class HeldLease:
    """A lease from the view of its worker."""

    job: str
    worker: tuple[str, int]
    token: str
    seqs: list[int]
    done: int = 0  #: number of reported batches
    last_report: Report | None = None


@dataclass
class JobModel:
    """The results that a job's workers recorded."""

    executions: int = 0
    recorded: dict[int, bytes] = field(default_factory=dict)


def open_without_sync(folder: Path) -> Engine:
    """Open the database without waiting for the disk, as these tests do not crash."""
    return open_sqlite(folder / "jobs.db", JOB_MIGRATIONS, ("journal_mode = WAL", "synchronous = OFF"))


class QueueMachine(RuleBasedStateMachine):
    """Calls the functions of the queue like workers do, with one transaction per call."""

    def open(self) -> Engine:
        return open_without_sync(self.folder)

    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp())

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(shapes=st.lists(SHAPES, min_size=1, max_size=3))
    def begin(self, shapes: list[tuple[int, int, int, bool]]) -> None:
        self.make()
        self.engine = self.open()
        self.now = 1000.0
        self.jobs: dict[str, JobModel] = {}
        self.held: list[HeldLease] = []
        self.lost: list[HeldLease] = []
        for count, items, max_attempts, isolate in shapes:
            with self.engine.begin() as connection:
                job = put_job(connection, count, items, self.now, max_attempts=max_attempts, isolate_failures=isolate)
            self.jobs[job] = JobModel()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.complete_all_jobs()
        finally:
            self.engine.dispose()
            self.remove()

    @precondition(lambda self: len(self.held) < 6)
    @rule(
        data=st.data(),
        worker=st.sampled_from(WORKERS),
        count=st.sampled_from([5, 3, 1]),
        size=st.sampled_from([1000, 20, 1]),
    )
    def lease(self, data: st.DataObject, worker: tuple[str, int], count: int, size: int) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        self.exchange(job, worker, [], count, size)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def add_the_hook(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        with self.engine.begin() as connection:
            add_hook(connection, job)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), lease_next=st.booleans())
    def report(self, data: st.DataObject, lease_next: bool) -> None:
        held = data.draw(st.sampled_from(self.held))
        report = self.draw_report(data, held)
        leased = self.exchange(held.job, held.worker, [report], 3 if lease_next else 0, 1000)
        assert leased.lost == ()
        self.record(held, report)

    @precondition(lambda self: any(held.last_report for held in self.held + self.lost))
    @rule(data=st.data())
    def report_the_same_again(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.held + self.lost if held.last_report]))
        assert held.last_report is not None
        self.expect_no_change(held, held.last_report)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def report_with_a_stale_token(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.lost))
        if held.done < len(held.seqs):
            self.expect_no_change(held, self.draw_report(data, held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def report_as_another_process(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        report = self.draw_report(data, held)
        with self.engine.begin() as connection:
            before = dump(connection)
            leased = exchange(connection, held.job, held.worker[0], 99, [report], 0, 0, self.now)
            assert leased.lost == (held.token,)
            assert dump(connection) == before

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        worker=st.sampled_from(WORKERS),
        all_processes=st.booleans(),
        cause=st.sampled_from([None, "killed"]),
        has_running_batch=st.booleans(),
    )
    def release(
        self,
        data: st.DataObject,
        worker: tuple[str, int],
        all_processes: bool,
        cause: str | None,
        has_running_batch: bool,
    ) -> None:
        pid = None if all_processes else worker[1]
        ended = [h for h in self.held if h.worker[0] == worker[0] and pid in (None, h.worker[1])]
        blame = WorkerDeath(cause) if cause else None
        if blame and has_running_batch and ended:
            inside = data.draw(st.sampled_from(ended))
            blame = WorkerDeath("killed", inside.job, data.draw(st.sampled_from(inside.seqs)))
        with self.engine.begin() as connection:
            assert release(connection, worker[0], pid, blame, self.now) == len(ended)
        self.lose(ended)

    @precondition(lambda self: self.held)
    @rule(renewed=st.sets(st.sampled_from(WORKERS)), seconds=st.sampled_from([1.0, LEASE_S + 1]))
    def pass_time_and_expire(self, renewed: set[tuple[str, int]], seconds: float) -> None:
        kept = [held for held in self.held if held.worker in renewed] if seconds > LEASE_S else list(self.held)
        with self.engine.begin() as connection:
            for worker in renewed:  # renewed just before they would expire
                tokens = [held.token for held in self.held + self.lost if held.worker == worker]
                expected = tuple(held.token for held in self.lost if held.worker == worker)
                assert renew(connection, *worker, tokens, self.now + seconds - 1) == expected
            others = [held for held in self.held if held.worker not in renewed]
            self.now += seconds
            if seconds <= LEASE_S:
                for held in others:
                    renew(connection, *held.worker, [held.token], self.now)
            assert expire(connection, self.now) == len(self.held) - len(kept)
        self.lose([held for held in self.held if held not in kept])

    @precondition(lambda self: len(self.lost) > 5)
    @rule(data=st.data())
    def stop_a_job(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        with self.engine.begin() as connection:
            ledger = open_ledger(connection, job)
            assert ledger is not None
            if ledger.move(JobStatus.STOPPED, self.now):
                ledger.save(connection, self.now)
                self.lose([held for held in self.held if held.job == job])

    @precondition(lambda self: self.held)
    @rule()
    def restart(self) -> None:
        self.engine.dispose()
        self.engine = self.open()

    @invariant()
    def every_batch_is_in_one_place(self) -> None:
        if hasattr(self, "engine"):
            with self.engine.begin() as connection:
                check_jobs(connection)
                for job_id, model in self.jobs.items():
                    number = connection.execute(select(jobs.c.number).where(jobs.c.id == job_id)).scalar_one()
                    stored = {key - first_key(number): value for key, value in self.stored_results(connection, number)}
                    assert stored == model.recorded

    def exchange(
        self, job: str, worker: tuple[str, int], reports: Sequence[Report], max_batches: int, max_bytes: int
    ) -> LeaseReply:
        with self.engine.begin() as connection:
            leased = exchange(connection, job, *worker, reports, max_batches, max_bytes, self.now)
        if leased.lease:
            batches = leased.lease.batches
            seqs = [batch.seq for batch in batches]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
            assert len(seqs) <= max_batches
            assert len(seqs) == 1 or sum(len(batch.payload) for batch in batches) <= max_bytes
            self.held.append(HeldLease(job, worker, leased.lease.token, seqs))
        elif max_batches and not leased.is_done:
            assert leased.opens_at is None or leased.opens_at > self.now
        return leased

    def draw_report(self, data: st.DataObject, held: HeldLease) -> Report:
        todo = held.seqs[held.done :]
        done = todo[: data.draw(st.sampled_from([(len(todo) + 1) // 2, 1, len(todo)]))]
        failed = data.draw(st.sets(st.sampled_from(done)))
        self.jobs[held.job].executions += 1
        value = str(self.jobs[held.job].executions).encode()
        return Report(
            held.token,
            done[-1],
            tuple(BatchFailure(seq, "ValueError: bad") for seq in sorted(failed)),
            tuple((seq, value) for seq in done if seq not in failed and seq != HOOK_SEQ),
            seconds=0.5,
        )

    def record(self, held: HeldLease, report: Report) -> None:
        recorded = self.jobs[held.job].recorded
        for seq, value in report.results:
            assert seq not in recorded
            recorded[seq] = value
        held.done = held.seqs.index(report.upto) + 1
        held.last_report = report
        if held.done == len(held.seqs):
            self.lose([held])

    def expect_no_change(self, held: HeldLease, report: Report) -> None:
        with self.engine.begin() as connection:
            before = dump(connection)
            leased = exchange(connection, held.job, *held.worker, [report], 0, 0, self.now)
            assert leased.lost == (() if held in self.held else (held.token,))
            assert dump(connection) == before

    def lose(self, ended: list[HeldLease]) -> None:
        self.held = [held for held in self.held if held not in ended]
        self.lost += ended

    def complete_all_jobs(self) -> None:
        """Complete every job with a worker that never fails."""
        for job_id, model in self.jobs.items():
            reports: list[Report] = []
            for _ in range(500):
                with self.engine.begin() as connection:
                    leased = exchange(connection, job_id, "last", 1, reports, 4, 1000, self.now)
                    assert not leased.lost
                    ledger = open_ledger(connection, job_id)
                    assert ledger is not None
                    if ledger.status.is_over:
                        break
                    add_hook(connection, job_id)
                reports = []
                if leased.lease:
                    seqs = [batch.seq for batch in leased.lease.batches]
                    returned = {} if leased.lease.is_hook else dict.fromkeys(seqs, b"0")
                    reports = [Report(leased.lease.token, seqs[-1], (), tuple(returned.items()))]
                    model.recorded |= returned
                else:
                    self.now += LEASE_S + 31
                    with self.engine.begin() as connection:
                        expire(connection, self.now)
            with self.engine.begin() as connection:
                check_jobs(connection)
                job = connection.execute(select(jobs).where(jobs.c.id == job_id)).one()
                assert JobStatus(job.status).is_over
                if job.status != JobStatus.STOPPED:
                    assert not open_seqs(connection, job.number)
                    dead = connection.execute(select(dead_letters.c.key)).scalars().all()
                    gone = {key - first_key(job.number) for key in dead if key // first_key(1) == job.number}
                    assert gone.isdisjoint(model.recorded)

    def stored_results(self, connection: Connection, number: int) -> list[tuple[int, bytes]]:
        is_of_job = results.c.key.between(first_key(number), first_key(number + 1) - 1)
        return [(row.key, row.value) for row in connection.execute(select(results).where(is_of_job))]


QueueMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestQueue = QueueMachine.TestCase


def test_the_batch_queue_in_postgresql(postgres: Postgres) -> None:
    class Machine(QueueMachine):
        def make(self) -> None:
            self.url = postgres.new_database()

        def open(self) -> Engine:
            return open_jobs(self.url)

        def remove(self) -> None:
            postgres.return_database(self.url)

    fewer_examples = settings(QueueMachine.TestCase.settings, max_examples=4, stateful_step_count=20, database=None)
    run_state_machine_as_test(Machine, settings=fewer_examples)
