"""Job workers that die, time out or cannot reach their operator; each crash test is named after the crash."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cortex.jobs.spec import batch_id
from cortex.lifecycle import DeathCause, ProcessState
from cortex.worker.spec import Death
from harness.jobs.job_workers import JobReplica, running_job_worker
from harness.replicas.scripted_operator import ScriptedJob
from harness.wait import wait_until

pytestmark = pytest.mark.processes

HANDLER = """
    import ctypes, os, time
    from pathlib import Path

    class Handler:
        def __init__(self, config):
            self.config = config
            if config.get("die"):
                os.kill(os.getpid(), 9)

        def handle_batch(self, payload, batch_id):
            for item in payload:
                if item == "exit":
                    os._exit(3)
                elif item == "null dereference":
                    ctypes.string_at(0)
                elif item == "abort":
                    os.abort()
                elif item == "allocate":
                    self.hoard = bytearray(os.urandom(1)) * (400 * 1024 * 1024)
                    time.sleep(10)
                elif item == "stuck in C":
                    print("stuck", flush=True)
                    ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter lock
                elif isinstance(item, str) and item.startswith("C for"):
                    print("in C", flush=True)
                    ctypes.PyDLL(None).usleep(int(float(item.split()[2]) * 1e6))
                elif item == "close descriptors":
                    os.closerange(3, 4096)
                elif item == "fork":
                    os.fork()
                elif item == "who":
                    print("who", os.getpid(), flush=True)
                elif item == "end of the lease":
                    print(item, flush=True)
                elif item == "sleep":
                    print("asleep", flush=True)
                    time.sleep(60)
                elif isinstance(item, str) and item.startswith("wait for"):
                    print("waits", flush=True)
                    while not Path(item.split()[2]).exists():
                        time.sleep(0.01)

        def on_job_complete(self):
            if self.config.get("die_in_hook"):
                os._exit(4)
"""


def wait_death(worker: JobReplica) -> Death:
    return worker.wait_for(lambda: worker.replica.status().processes[0].deaths)[-1]


@pytest.mark.parametrize(
    ("item", "words", "cause"),
    [
        ("exit", "exited with code 3", DeathCause.EXITED),
        ("null dereference", "segmentation fault (SIGSEGV)", DeathCause.SEGMENTATION_FAULT),
        ("abort", "ended by a signal (SIGABRT)", DeathCause.SIGNALLED),
    ],
)
def test_a_worker_that_dies_in_a_batch_is_reported_and_replaced(item: str, words: str, cause: DeathCause) -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([[0], [1], [item], [3]])
        death = wait_death(worker)
        assert death.cause is cause
        assert death.message == words
        assert death.inside == "job-1:2"
        assert death.pid == worker.operator.joins[0]
        worker.operator.give_back(job, fail=[2])
        worker.wait_over(job)
        assert sorted(set(job.succeeded)) == [0, 1, 3]
        wait_until(lambda: f"{words}, inside: batch {batch_id('job-1', 2)}" in worker.log())
        assert worker.replica.status().processes[0].restarts == 1


def test_a_death_after_a_batch_names_that_batch() -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([[0], ["close descriptors"]])
        death = wait_death(worker)
        assert (death.inside, death.after) == ("", "job-1:1")
        assert death.message == "exited with code 1"
        worker.operator.give_back(job, fail=[1])
        worker.wait_over(job)


def test_a_process_forked_by_a_batch_runs_no_batches() -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([*[[0]] * 300, ["fork"], *[["who"]] * 20, *[[0]] * 300])  # many batches are in one lease
        worker.wait_over(job)

        def pids() -> list[str]:
            return [line.split()[-1] for line in worker.log().splitlines() if " who " in line]

        worker.wait_for(lambda: len(pids()) >= 20)
        assert pids() == [str(worker.operator.joins[0])] * 20


def test_a_worker_killed_between_batches_names_no_batch() -> None:
    with running_job_worker(HANDLER) as worker:
        worker.wait_over(worker.submit([[1]]))
        os.kill(worker.wait_for_next_process(), signal.SIGKILL)
        death = wait_death(worker)
        assert death.message == "killed (SIGKILL)"
        assert death.inside == ""


def test_a_death_in_the_hook_is_reported() -> None:
    with running_job_worker(HANDLER) as worker, worker.replica.statuses() as statuses:
        worker.submit([[1]], has_hook=True, config={"die_in_hook": True})
        deaths = next(status.processes[0].deaths for status in statuses if status.processes[0].deaths)
        assert deaths[-1].inside == "job-1:hook"
        wait_until(lambda: "inside: on_job_complete" in worker.log())


def test_workers_restart_at_once_after_batch_deaths_and_the_last_deaths_are_reported() -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([["null dereference"] for _ in range(20)])
        states: set[ProcessState] = set()

        def has_died(times: int) -> bool:
            process = worker.replica.status().processes[0]
            states.add(process.state)
            return process.restarts >= times

        for times in range(1, 21):
            worker.wait_for(lambda times=times: has_died(times))
            worker.operator.give_back(job, fail=[seq for held in job.held.values() for seq in held.seqs])
        assert ProcessState.BACKING_OFF not in states
        worker.wait_over(job)
        deaths = worker.replica.status().processes[0].deaths
        assert [death.inside for death in deaths] == [f"job-1:{seq}" for seq in range(4, 20)]
        assert len({death.pid for death in deaths}) == 16


def test_a_death_in_the_constructor_is_a_failed_start() -> None:
    with running_job_worker(HANDLER) as worker:
        worker.submit([[1]], config={"die": True})
        process = worker.replica.wait_state(ProcessState.BACKING_OFF).processes[0]
        assert process.failed_starts >= 1  # the next one follows after a second
        assert process.deaths[-1].inside == ""


def test_a_worker_over_its_memory_limit_is_reported_as_out_of_memory() -> None:
    with running_job_worker(HANDLER, mem_limit_bytes=300 * 1024 * 1024) as worker:
        worker.submit([[1], ["allocate"]])
        death = wait_death(worker)
        assert death.cause is DeathCause.OUT_OF_MEMORY
        assert "mem_limit is 300 MiB" in death.message
        assert death.inside == "job-1:1"


@pytest.mark.parametrize("item", ["sleep", "stuck in C"])
def test_a_batch_is_killed_at_its_timeout(item: str) -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([[1], [item], [2]], batch_timeout_s=4)
        death = wait_death(worker)
        assert death.cause is DeathCause.TIMED_OUT
        assert death.message == "timed out after 4 s"
        assert death.inside == "job-1:1"
        worker.operator.give_back(job, fail=[1])
        worker.wait_over(job)


def test_batches_continue_during_an_operator_outage_and_are_reported_later(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    with running_job_worker(HANDLER) as worker:
        quick = [[i] for i in range(100)]
        job = worker.submit([*quick, [f"wait for {go_on}"], *quick, ["end of the lease"]], min_lease=512)
        worker.wait_for(lambda: "waits" in worker.log())
        worker.operator.die()
        go_on.touch()
        worker.wait_for(lambda: "end of the lease" in worker.log())
        worker.operator.start()
        worker.wait_over(job)
        assert sorted(job.succeeded) == list(range(202))
        assert worker.replica.status().processes[0].restarts == 0


def test_a_report_whose_reply_was_lost_counts_once() -> None:
    with running_job_worker(HANDLER) as worker:
        worker.operator.swallow_answers = 3
        job = worker.submit([[i] for i in range(300)])
        # The worker does not have a lease from a lost response; its renewals list the leases that it has.
        worker.wait_for(lambda: worker.operator.swallow_answers == 0)
        wait_until(lambda: worker.operator.renewals)
        release_unknown(job, set(worker.operator.renewals[-1].tokens))
        worker.operator.change()
        worker.wait_over(job)
        assert sorted(job.succeeded) == list(range(300))


def test_a_partial_report_whose_reply_was_lost_keeps_its_lease(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with running_job_worker(HANDLER) as worker:
        quick = [[i] for i in range(20)]
        # In one lease, so that the lost reply is that to a report and grants no lease.
        job = worker.submit([*quick, [f"wait for {first}"], *quick, [f"wait for {second}"], *quick], min_lease=512)
        worker.wait_for(lambda: len(job.succeeded) == 20)
        worker.operator.change(swallow_answers=1)
        first.touch()
        worker.wait_for(lambda: worker.operator.swallow_answers == 0)
        second.touch()
        worker.wait_over(job)
        assert sorted(job.succeeded) == list(range(62))


def test_a_lost_lease_is_abandoned(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    with running_job_worker(HANDLER) as worker:
        quick = [[i] for i in range(40)]
        batches = [*quick, [f"wait for {go_on}"], *[[f"C for 0.1 {i}"] for i in range(100)]]
        job = worker.submit(batches, lease_s=0.6, min_lease=512)
        worker.wait_for(lambda: "waits" in worker.log())
        worker.wait_for(lambda: len(job.succeeded) == 40)
        worker.operator.lose(job)
        renewed = len(worker.operator.renewals)
        worker.wait_for(lambda: len(worker.operator.renewals) > renewed)
        go_on.touch()
        worker.wait_over(job)
        assert len(job.succeeded) == 40
        assert worker.log().count("in C") <= 5  # until the worker has read the reply to the renewal


def test_leases_are_renewed_while_a_batch_runs(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([[f"wait for {go_on}"]], lease_s=0.3)
        worker.wait_for(lambda: len(worker.operator.renewals) > 5)
        tokens = {token for renewal in worker.operator.renewals for token in renewal.tokens}
        assert tokens == {job.leases[0][0]}
        assert {renewal.pid for renewal in worker.operator.renewals} == {worker.replica.pid}
        go_on.touch()
        worker.wait_over(job)


def test_leases_are_renewed_while_a_call_keeps_the_interpreter_lock() -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([[1], ["C for 3"], [2]], lease_s=0.6)
        worker.wait_for(lambda: "in C" in worker.log())
        renewed = len(worker.operator.renewals)
        worker.wait_for(lambda: len(worker.operator.renewals) > renewed + 5, timeout_s=2.8)
        assert job.leases[-1][0] in worker.operator.renewals[-1].tokens
        worker.wait_over(job)
        assert sorted(job.succeeded) == [0, 1, 2]


def test_leases_of_a_suspended_process_are_not_renewed() -> None:
    with running_job_worker(HANDLER) as worker:
        worker.submit([["sleep"]], lease_s=0.3)
        worker.wait_for(lambda: "asleep" in worker.log() and len(worker.operator.renewals) > 2)
        os.kill(worker.replica.pid, signal.SIGSTOP)
        wait_until(lambda: "T" in Path(f"/proc/{worker.replica.pid}/stat").read_text().rpartition(")")[2][:3])
        renewed = len(worker.operator.renewals)
        ends_at = time.monotonic() + 1.2
        wait_until(lambda: time.monotonic() > ends_at)
        assert len(worker.operator.renewals) <= renewed + 1


def release_unknown(job: ScriptedJob, renewed: set[str]) -> None:
    for token in set(job.held) - renewed:
        held = job.held.pop(token)
        job.open += [seq for seq in held.seqs if seq >= held.next]
