"""Planning of job workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.lifecycle import DeathCause, JobStatus, ProcessState
from cortex.operator.jobs.plan import (
    WARM_S,
    YIELD_DRAIN_S,
    AssignWorker,
    EndJob,
    PlannedJob,
    SetMessage,
    StartWorker,
    StopWorker,
    plan_jobs,
)
from harness.jobs.planned_jobs import NOW, SimulatedJobs, free_capacity, job, worker


def test_a_job_gets_the_workers_it_asked_for() -> None:
    assert plan_jobs([job("a", 3)], [], free_capacity(4), NOW) == [StartWorker("a")] * 3


def test_no_more_workers_are_started_than_there_are_batches() -> None:
    assert plan_jobs([job("a", 3, batches=2)], [], free_capacity(4), NOW) == [StartWorker("a")] * 2


def test_running_workers_are_not_started_again() -> None:
    assert plan_jobs([job("a", 2)], [worker("w1", "a"), worker("w2", "a")], free_capacity(2), NOW) == []


def test_a_job_that_is_still_being_enqueued_gets_no_worker() -> None:
    assert plan_jobs([job("a", status=JobStatus.ENQUEUING)], [], free_capacity(4), NOW) == []


def test_a_job_that_completes_needs_one_worker_for_its_hook() -> None:
    completing = job("a", 3, status=JobStatus.COMPLETING, batches=0)
    assert plan_jobs([completing], [], free_capacity(4), NOW) == [StartWorker("a")]
    assert plan_jobs([completing], [worker("w", "a")], free_capacity(4), NOW) == []


def test_each_job_gets_a_first_worker_before_any_gets_a_second() -> None:
    actions = plan_jobs([job("a", 4), job("b", 4)], [], free_capacity(3), NOW)
    assert Counter(action.job_id for action in actions if isinstance(action, StartWorker)) == {"a": 2, "b": 1}


def test_a_job_without_capacity_stores_what_it_waits_for() -> None:
    lack = "a worker needs 3 cores, but 1 of this machine's 4 is free; it starts once there is capacity"
    jobs, crew = [job("a", cpu=3), job("b", status=JobStatus.RUNNING)], [worker("w", "b")]
    assert plan_jobs(jobs, crew, free_capacity(1), NOW) == [SetMessage("a", lack)]
    lack = lack.replace(
        "there is capacity", "no other worker runs (replicas of APIs hold 2 cores: delete some, or lower"
    )
    held = replace(free_capacity(1), replica_cores=2.0)
    assert plan_jobs(jobs, crew, held, NOW) == [SetMessage("a", f"{lack} their compute.cpu)")]
    (hopeless,) = plan_jobs([job("a", cpu=8)], [], free_capacity(4), NOW)
    assert hopeless == SetMessage("a", "a worker needs 8 cores, but this machine has 4; lower its `compute`")


def test_clears_the_message_once_there_is_capacity() -> None:
    waiting = job("a", cpu=1, message="a worker wants …")
    assert plan_jobs([waiting], [], free_capacity(4), NOW) == [StartWorker("a"), SetMessage("a", "")]


def test_the_first_job_starts_although_replicas_hold_all_cores() -> None:
    served = replace(free_capacity(-1), replica_cores=5.0)
    assert plan_jobs([job("a", 2), job("b")], [], served, NOW)[0] == StartWorker("a")
    assert plan_jobs([job("unprepared", is_prepared=False), job("b")], [], served, NOW) == [StartWorker("b")]
    actions = plan_jobs([job("huge", cpu=8), job("b")], [], served, NOW)
    assert [action for action in actions if isinstance(action, StartWorker)] == [StartWorker("b")]


def test_only_one_worker_shares_the_cores_of_replicas() -> None:
    served = replace(free_capacity(0), replica_cores=4.0)
    jobs = [job("a", 2, status=JobStatus.RUNNING), job("b", status=JobStatus.RUNNING)]
    assert plan_jobs(jobs, [], served, NOW) == [StartWorker("a")]
    assert plan_jobs(jobs, [worker("w", "a")], served, NOW) == []
    assert plan_jobs(jobs, [worker("w", None, is_leaving=True)], served, NOW) == []


def test_memory_that_replicas_hold_is_not_shared() -> None:
    full = replace(free_capacity(0, memory=0), replica_cores=4.0, replica_memory_bytes=6 * 1024**3)
    assert plan_jobs([job("a", mem=3 * 1024**3)], [], full, NOW) == [
        SetMessage(
            "a",
            "a worker needs 3 GiB, but 0 bytes of this machine's 8 GiB are free; it starts once there is capacity"
            " (replicas of APIs hold 6 GiB: delete some, or lower their compute.mem)",
        )
    ]


def test_memory_limits_the_number_of_workers() -> None:
    actions = plan_jobs([job("a", 2, mem=3 * 1024**3)], [], free_capacity(4, memory=4 * 1024**3), NOW)
    assert actions == [StartWorker("a")]


def test_a_job_without_workers_takes_one_from_the_largest_job() -> None:
    crew = [worker(f"w{number}", "a") for number in range(3)]
    jobs = [job("a", 3, status=JobStatus.RUNNING), job("b", 2)]
    stop, note = plan_jobs(jobs, crew, free_capacity(0), NOW)
    assert stop == StopWorker("w2", YIELD_DRAIN_S)
    assert isinstance(note, SetMessage)
    crew[1] = worker("w1", "a", is_idle=True)
    assert plan_jobs(jobs, crew, free_capacity(0), NOW)[0] == StopWorker("w1", YIELD_DRAIN_S)


def test_stops_no_second_worker_while_the_first_one_is_draining() -> None:
    crew = [worker("w0", "a"), worker("w1", "a"), worker("w2", "a", is_leaving=True)]
    jobs = [job("a", 2, status=JobStatus.RUNNING), job("b", 1)]
    assert [type(action) for action in plan_jobs(jobs, crew, free_capacity(0), NOW)] == [SetMessage]


def test_a_job_keeps_its_only_worker() -> None:
    jobs = [job("a", 1, status=JobStatus.RUNNING), job("b", 1)]
    assert [type(action) for action in plan_jobs(jobs, [worker("w", "a")], free_capacity(0), NOW)] == [SetMessage]


def test_stops_no_worker_for_a_job_that_can_never_run() -> None:
    crew = [worker("w0", "a"), worker("w1", "a")]
    jobs = [job("a", 2, status=JobStatus.RUNNING), job("b", 1, cpu=9)]
    assert [type(action) for action in plan_jobs(jobs, crew, free_capacity(0), NOW)] == [SetMessage]


def test_workers_of_a_job_that_is_over_are_stopped() -> None:
    assert plan_jobs([], [worker("w", "a")], free_capacity(4), NOW) == [StopWorker("w")]


def test_a_worker_with_models_waits_warm_and_is_stopped_after_a_while() -> None:
    assert plan_jobs([], [worker("w", "a", models=True, idle_since=NOW)], free_capacity(4), NOW) == [
        AssignWorker("w", None)
    ]
    idle = worker("w", None, models=True, idle_since=NOW)
    assert plan_jobs([], [idle], free_capacity(4), NOW + WARM_S) == []
    assert plan_jobs([], [idle], free_capacity(4), NOW + WARM_S + 1) == [StopWorker("w")]


def test_a_worker_of_an_old_revision_does_not_wait_warm() -> None:
    outdated = replace(worker("w", None, models=True, idle_since=NOW), is_current=False)
    assert plan_jobs([], [outdated], free_capacity(4), NOW) == [StopWorker("w")]
    assert plan_jobs([job("b")], [outdated], free_capacity(0), NOW) == [AssignWorker("w", "b")]


def test_a_warm_worker_goes_to_the_next_job_of_its_revision_only() -> None:
    warm = worker("w", None, models=True, idle_since=NOW)
    assert plan_jobs([job("b")], [warm], free_capacity(0), NOW) == [AssignWorker("w", "b")]
    assert plan_jobs([job("b", revision="r2")], [warm], free_capacity(4), NOW) == [StartWorker("b")]


@pytest.mark.parametrize("other", [job("huge", cpu=64.0), job("building", is_prepared=False)])
def test_a_job_that_can_not_start_does_not_block_others(other: PlannedJob) -> None:
    actions = plan_jobs([other, job("a", 3)], [worker("w", "a")], free_capacity(3), NOW)
    assert [action for action in actions if isinstance(action, StartWorker)] == [StartWorker("a"), StartWorker("a")]


def test_stops_a_warm_worker_for_a_job_of_another_revision() -> None:
    warm = worker("w", None, models=True, idle_since=NOW)
    stop, _ = plan_jobs([job("b", revision="r2")], [warm], free_capacity(0), NOW)
    assert stop == StopWorker("w")


def test_a_job_none_of_whose_workers_can_start_fails_with_the_reason() -> None:
    crew = [worker("w", "a", state=ProcessState.BACKING_OFF, failed_starts=3, failure="ValueError: bad weights")]
    end, stop = plan_jobs([job("a")], crew, free_capacity(4), NOW)
    message = "no worker can run: ValueError: bad weights"
    assert end == EndJob("a", JobStatus.WORKER_ERROR, message, "File p.py")
    assert stop == StopWorker("w")


def test_a_job_whose_workers_run_out_of_memory_at_start_fails_as_oom() -> None:
    crew = [
        worker("w", "a", state=ProcessState.BACKING_OFF, failed_starts=3, failure="…", death=DeathCause.OUT_OF_MEMORY)
    ]
    end = plan_jobs([job("a")], crew, free_capacity(4), NOW)[0]
    assert isinstance(end, EndJob)
    assert end.status is JobStatus.WORKER_OOM


def test_a_worker_that_ran_before_gets_more_start_attempts() -> None:
    crew = [worker("w", "a", state=ProcessState.BACKING_OFF, failed_starts=9, restarts=1, failure="ValueError")]
    assert plan_jobs([job("a")], crew, free_capacity(4), NOW) == []
    crew = [worker("w", "a", state=ProcessState.BACKING_OFF, failed_starts=10, restarts=1, failure="ValueError")]
    assert isinstance(plan_jobs([job("a")], crew, free_capacity(4), NOW)[0], EndJob)


def test_a_job_whose_completion_hook_has_no_process_soon_ends_with_the_reason() -> None:
    crew = [worker("w", "a", state=ProcessState.BACKING_OFF, failed_starts=3, restarts=1, failure="ValueError: no key")]
    end = plan_jobs([job("a", status=JobStatus.COMPLETING)], crew, free_capacity(4), NOW)[0]
    message = "on_job_complete can't run, because no worker can start: ValueError: no key"
    assert end == EndJob("a", JobStatus.WORKER_ERROR, message, "File p.py")
    assert plan_jobs([job("a", 2, status=JobStatus.COMPLETING)], [*crew, worker("v", "a")], free_capacity(4), NOW) == []


def test_repeated_deaths_outside_of_any_batch_end_the_job() -> None:
    assert plan_jobs([job("a")], [worker("w", "a", deaths=("a:1", *[""] * 9))], free_capacity(4), NOW) == []
    after = worker("w", "a", deaths=[""] * 10, after="a:7")
    assert plan_jobs([job("a")], [after], free_capacity(4), NOW) == []  # each death costs a batch an attempt
    end = plan_jobs([job("a")], [worker("w", "a", deaths=("a:1", *[""] * 10))], free_capacity(4), NOW)[0]
    assert end == EndJob("a", JobStatus.WORKER_ERROR, "no worker can run: segmentation fault")


@pytest.mark.parametrize("others", [worker("v", "a"), worker("v", "a", failed_starts=2, failure="ValueError")])
def test_a_job_is_not_given_up_while_one_of_its_workers_may_still_start(others: object) -> None:
    failed = worker("w", "a", state=ProcessState.BACKING_OFF, failed_starts=5, failure="ValueError")
    assert plan_jobs([job("a", 2)], [failed, others], free_capacity(4), NOW) == []  # type: ignore[list-item]


@pytest.mark.parametrize("status", [JobStatus.ENQUEUING, JobStatus.PENDING, JobStatus.RUNNING, JobStatus.COMPLETING])
def test_a_job_times_out_in_any_status(status: JobStatus) -> None:
    late = job("a", status=status, deadline_at=NOW)
    assert plan_jobs([late], [], free_capacity(4), NOW)[0] == EndJob("a", JobStatus.TIMED_OUT, "timed out after 60 s")


def test_a_job_waits_for_its_environment() -> None:
    assert plan_jobs([job("a", is_prepared=False)], [], free_capacity(4), NOW) == []
    failing = job("a", is_prepared=False, waits_for="its environment can't be built: no such package")
    assert plan_jobs([failing], [], free_capacity(4), NOW) == [SetMessage("a", failing.waits_for)]


def test_a_job_whose_environment_repeatedly_fails_to_build_fails_with_the_reason() -> None:
    failing = replace(job("a", is_prepared=False, waits_for="no such package"), failed_preparations=2)
    assert plan_jobs([failing], [], free_capacity(4), NOW) == [SetMessage("a", "no such package")]
    end = plan_jobs([replace(failing, failed_preparations=3)], [], free_capacity(4), NOW)
    assert end == [EndJob("a", JobStatus.WORKER_ERROR, "no such package")]


def test_plans_thousands_of_workers_without_capacity_quickly() -> None:
    jobs = [job(f"j{number}", 10_000, batches=10_000) for number in range(20)]
    started = time.process_time()
    plan_jobs(jobs, [], free_capacity(4), NOW)
    assert time.process_time() - started < 0.5


@pytest.mark.heavy
def test_plans_thousands_of_pending_jobs_quickly() -> None:
    jobs = [job(f"j{number}", revision=f"r{number}") for number in range(3_000)]
    started = time.process_time()
    plan_jobs(jobs, [worker(f"w{number}", f"j{number}") for number in range(8)], free_capacity(0, of=8), NOW)
    assert time.process_time() - started < 1.5


@given(
    wishes=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.2, 0.5, 1.0, 2.0])), max_size=6),
    cores=st.floats(0, 8),
)
def test_never_exceeds_the_capacity_and_uses_all_of_it(wishes: list[tuple[int, float]], cores: float) -> None:
    jobs = [job(f"j{number}", workers, cpu=cpu) for number, (workers, cpu) in enumerate(wishes)]
    started = Counter(
        action.job_id
        for action in plan_jobs(jobs, [], free_capacity(cores, of=8), NOW)
        if isinstance(action, StartWorker)
    )
    taken = sum(started[item.record.id] * (item.compute.cpu or 0) for item in jobs)
    assert taken <= cores + 1e-6 or sum(started.values()) == 1
    for item in jobs:
        is_short = started[item.record.id] < item.wanted
        assert not is_short or (item.compute.cpu or 0) > cores - taken - 1e-6


@pytest.mark.parametrize("replica_cores", [0.0, 1.0, 1.8, 2.0, 2.2, 3.0])
def test_apis_take_turns_however_many_cores_replicas_ask_for(replica_cores: float) -> None:
    machine = SimulatedJobs(2, replica_cores)
    machine.submit(*(job(name, batches=3, cpu=0.2, revision=name[:2]) for name in ("qa1", "qb1", "qa2", "qa3", "qa4")))
    machine.run(40)
    assert machine.jobs == []
    assert machine.started[:2] == ["qa1", "qb1"]


def test_a_large_job_is_not_overtaken_for_ever_by_small_ones() -> None:
    machine = SimulatedJobs(2, 0)
    machine.submit(job("a", batches=1), job("b", batches=2), job("large", cpu=2, revision="r2"))
    machine.run(20, lambda step: [job(f"small{step}", batches=2)])
    assert machine.started[:4] == ["a", "b", "small0", "large"]  # `b`, which is older, had half of the machine


def test_small_jobs_use_what_an_older_job_can_not_use_yet() -> None:
    machine = SimulatedJobs(2, 0)
    machine.submit(job("long", batches=10), job("large", cpu=2, revision="r2"), job("small", batches=3))
    machine.run(20)
    assert machine.started == ["long", "small", "large"]


def test_a_job_that_waits_for_the_last_workers_of_younger_ones_keeps_their_capacity() -> None:
    crew = [worker("w", "over", revision="r2")]
    jobs = [job("large", cpu=2), job("small", revision="r2")]
    assert plan_jobs(jobs, crew, free_capacity(1, of=2), NOW)[0] == StopWorker("w")
    jobs.append(job("running", status=JobStatus.RUNNING))
    actions = plan_jobs(jobs, [worker("w", "running")], free_capacity(1, of=2), NOW)
    assert actions[1:] == [SetMessage("small", "older jobs wait for the capacity that is free")]
    assert isinstance(actions[0], SetMessage)


def test_a_job_takes_a_worker_only_from_a_job_that_holds_what_it_lacks() -> None:
    gib = 1024**3
    crew = [worker(f"c{number}", "cores") for number in range(3)]
    crew += [worker(f"m{number}", "memory", mem=4 * gib) for number in range(2)]
    jobs = [job("cores", 3), job("memory", 2, mem=4 * gib), job("b", mem=2 * gib, cpu=0.2)]
    stops = [
        action
        for action in plan_jobs(jobs, crew, free_capacity(1, memory=0, of=8), NOW)
        if isinstance(action, StopWorker)
    ]
    assert stops == [StopWorker("m1", YIELD_DRAIN_S)]


_CORES = st.sampled_from([0.2, 0.5, 1.0, 2.0, 4.0])
_GIB = 1024**3
_ORDERS = st.tuples(  # cores, GiB, workers, batches, revision
    _CORES, st.sampled_from([None, 1, 5]), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["r1", "r2", "r3"])
)


@given(
    cores=st.sampled_from([2.0, 4.0]),
    held=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0, 1.1, 2.0]),
    replica_memory=st.sampled_from([0, 2, 4]),
    first=st.lists(_ORDERS, min_size=1, max_size=4),
    later=st.lists(_ORDERS, min_size=1, max_size=2),
)
def test_no_job_waits_for_ever_while_younger_ones_are_served(
    cores: float, held: float, replica_memory: int, first: list[tuple[Any, ...]], later: list[tuple[Any, ...]]
) -> None:
    """`first` are submitted at once; then there are always three unfinished jobs of each of `later`."""
    machine = SimulatedJobs(cores, cores * held, replica_memory * _GIB)

    def order(name: str, wishes: tuple[Any, ...]) -> PlannedJob:
        cpu, gib, workers, batches, revision = wishes
        # One revision has one compute.
        return job(name, workers, batches=batches, cpu=cpu, mem=gib and gib * _GIB, revision=f"{revision}/{cpu}/{gib}")

    def can_run(wishes: tuple[Any, ...]) -> bool:
        return wishes[0] <= cores and (wishes[1] or 0) <= 8 - replica_memory

    def arrive(step: int) -> Iterator[PlannedJob]:
        for number, wishes in enumerate(later):
            if sum(each.record.id.startswith(f"later{number}-") for each in machine.jobs) < 3:
                yield order(f"later{number}-{step}", wishes)

    machine.submit(*(order(f"first{number}", wishes) for number, wishes in enumerate(first)))
    machine.run(60, arrive)
    feasible = {f"first{number}" for number, wishes in enumerate(first) if can_run(wishes)}
    feasible |= {f"later{number}-{step}" for number, wishes in enumerate(later) for step in range(3) if can_run(wishes)}
    assert feasible - set(machine.started) == set()


def test_free_cores_are_never_negative_in_messages() -> None:
    for cores in (-0.4, -1e-9, 0.0):
        (note,) = plan_jobs(
            [job("a"), job("b", status=JobStatus.RUNNING)], [worker("w", "b")], free_capacity(cores), NOW
        )
        assert isinstance(note, SetMessage)
        assert "but 0 of this machine's 4 are free" in note.message
