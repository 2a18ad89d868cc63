"""A job worker with a scripted operator: calls, reports, logs and exits."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from cortex.jobs.spec import batch_id
from cortex.lifecycle import ProcessState
from harness.jobs.job_workers import JobReplica, running_job_worker
from harness.wait import PATIENCE_S, has_ended, wait_until

pytestmark = pytest.mark.processes

HANDLER = """
    import json, os, sys, time
    from pathlib import Path

    made = 0
    imported = print("imported", flush=True)

    class Exits(Exception):
        def __str__(self):
            sys.exit(4)

    class Handler:
        def __init__(self, config, job_spec):
            global made
            made += 1
            self.made, self.config, self.job_id, self.sum = made, config, job_spec["job_id"], 0
            if config.get("fail"):
                raise ValueError("bad weights")
            print("constructed for", job_spec["job_id"], "by", os.getpid())

        def handle_batch(self, payload, batch_id):
            for item in payload:
                self.run(item, batch_id)
            return {"sum": sum(item for item in payload if isinstance(item, int)), "id": batch_id} if self.config.get(
                "return") else None

        def run(self, item, batch_id):
            if isinstance(item, int):
                self.sum += item
            elif item == "raise":
                raise ValueError("bad item")
            elif item == "raise what exits":
                raise Exits
            elif item == "exit":
                sys.exit(3)
            elif item.startswith("sleep"):
                print("asleep in", batch_id)
                time.sleep(float(item.split()[1]))
            elif item.startswith("wait for"):
                print("waits in", batch_id)
                while not Path(item.split()[2]).exists():
                    time.sleep(0.01)

        def on_job_complete(self):
            if self.config.get("fail_hook"):
                raise RuntimeError("no room for the sum")
            print("sum", self.sum, "made", self.made)
"""

PLAIN = """
    class Handler:
        def __init__(self, config):
            self.config = config

        def handle_batch(self, payload):
            return [value for value in payload] if self.config.get("return") else None
"""

ODD_RESULTS = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_batch(self, payload):
            import numpy
            return {"array": numpy.arange(3), 1: float("nan"), "text": "a\\nb"} if payload[0] else {1, 2}
"""


def test_every_batch_is_called_and_reported_once() -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([[i, i + 1] for i in range(2000)], has_hook=True)
        worker.wait_over(job)
        assert sorted(job.succeeded) == list(range(2000))
        assert job.failures == []
        assert job.results == {}
        assert job.hooks == [None]
        total = sum(2 * i + 1 for i in range(2000))
        wait_until(lambda: f"o sum {total} made 1" in worker.log())


def test_slow_batches_are_left_to_other_workers(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([["sleep 0.6"], [f"wait for {go_on}"], [1]])
        worker.wait_for(lambda: "waits in" in worker.log())
        assert [seqs for _, seqs in job.leases] == [(0,), (1,)]
        go_on.touch()
        worker.wait_over(job)


def test_exception_is_reported_and_logged_with_the_users_frames_only() -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([[1], ["raise"], [2], ["exit"], ["raise what exits"], [3]])
        worker.wait_over(job)
        assert job.succeeded == [0, 2, 5]
        failure, ended, unprintable = job.failures
        assert failure.seq == 1
        assert failure.error == "ValueError: bad item"
        assert 'File "handler.py"' in failure.traceback
        assert "cortex/" not in failure.traceback
        assert (ended.error, unprintable.error) == ("SystemExit: 3", "Exits")
        name = batch_id("job-1", 1)
        wait_until(lambda: f"e:{name} batch {name} failed:" in worker.log())
        wait_until(lambda: f"e:{name} ValueError: bad item" in worker.log())
        assert worker.replica.status().processes[0].restarts == 0


def test_reported_seconds_include_only_successful_calls() -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([["sleep 0.1"], ["sleep 4", "raise"], ["sleep 0.1"]])
        worker.wait_over(job)
        assert 0.2 <= job.seconds < 4


def test_results_are_json_and_others_are_dropped_with_one_log_line() -> None:
    with running_job_worker(ODD_RESULTS) as worker:
        job = worker.submit([[1], [0], [0], [0]])
        worker.wait_over(job)
        assert len(job.succeeded) == 4
        assert list(job.results) == [0]
        assert json.loads(job.results[0]) == {"array": [0, 1, 2], "1": None, "text": "a\nb"}
        wait_until(lambda: "is dropped" in worker.log())
        wait_until(lambda: worker.log().count("is dropped") == 1)


def test_a_result_that_json_cannot_hold_fails_its_batch_if_the_job_has_an_output() -> None:
    with running_job_worker(ODD_RESULTS) as worker:
        job = worker.submit([[1], [0], [1]], output="s3://bucket/out")
        worker.wait_over(job)
        assert job.succeeded == [0, 2]
        assert [(failure.seq, failure.error) for failure in job.failures] == [
            (1, "result: set is not JSON serializable; return a list: list(value)")
        ]


def test_finished_batches_are_reported_while_the_next_one_runs(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    with running_job_worker(HANDLER) as worker:
        quick = [[i] for i in range(100)]
        job = worker.submit([*quick, [f"wait for {go_on}"], *quick])
        worker.wait_for(lambda: len(job.succeeded) == 100)
        worker.wait_for(lambda: any(held.next == 100 for held in list(job.held.values())))
        go_on.touch()
        worker.wait_over(job)
        assert len(job.succeeded) == 201


def test_a_class_without_a_hook_completes_the_job() -> None:
    with running_job_worker(PLAIN) as worker:
        job = worker.submit([[1]], has_hook=True)
        worker.wait_over(job)
        assert job.hooks == [None]


def test_a_second_job_has_its_own_process_module_and_log() -> None:
    with running_job_worker(HANDLER) as worker:
        first = worker.submit([[1]], has_hook=True)
        worker.wait_over(first)
        second = worker.submit([[2]], "job-2", has_hook=True)
        worker.wait_over(second)
        wait_until(lambda: "sum 2 made 1" in worker.log("job-2"))
        assert "job-2" not in worker.log("job-1")
        wait_until(lambda: worker.log("job-1").count("sum 1 made 1") == 1)
        pids = [re.findall(rf"constructed for {job} by (\d+)", worker.log(job)) for job in ("job-1", "job-2")]
        assert len(pids[0]) == len(pids[1]) == 1
        assert pids[0] != pids[1]


def test_a_constructor_that_raises_for_a_second_job_is_a_failed_start() -> None:
    with running_job_worker(HANDLER) as worker:
        worker.wait_over(worker.submit([[1]]))
        worker.submit([[1]], "job-2", config={"fail": True})
        process = worker.replica.wait_state(ProcessState.BACKING_OFF).processes[0]
        assert process.failed_starts >= 1  # the next one follows after a second
        assert process.restarts == 0
        assert process.failure is not None
        assert process.failure.message == "ValueError: bad weights"


def test_a_worker_is_ready_once_the_class_is_constructed() -> None:
    with running_job_worker(HANDLER) as worker:
        wait_until(lambda: worker.operator.joins)
        assert worker.replica.status().processes[0].state is ProcessState.STARTING
        worker.submit([[1]])
        worker.replica.wait_ready()


def test_an_idle_worker_uses_no_cpu() -> None:
    with running_job_worker(HANDLER) as worker:
        worker.wait_over(worker.submit([[1]]))
        joins = len(worker.operator.joins)
        wait_until(lambda: len(worker.operator.joins) > joins or len(worker.operator.joins) > 1)
        before = cpu_ticks(worker.replica.pid)
        wait_a_while(worker, 3.0)
        assert cpu_ticks(worker.replica.pid) - before <= 1


def test_stop_while_idle_ends_the_process_at_once() -> None:
    with running_job_worker(HANDLER) as worker:
        worker.wait_over(worker.submit([[1]]))
        worker.replica.command(command="stop", drain_s=30)
        worker.replica.process.wait(PATIENCE_S)
        assert "stopped" in worker.log()


def test_a_stop_finishes_the_running_batch_and_starts_no_other(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([*[[i] for i in range(100)], [f"wait for {go_on}"], *[["sleep 0.1"]] * 100])
        worker.wait_for(lambda: "waits in" in worker.log())
        worker.replica.command(command="stop", drain_s=30)
        worker.replica.wait_state(ProcessState.STOPPING)
        go_on.touch()
        worker.replica.process.wait(PATIENCE_S)
        assert job.succeeded[:101] == list(range(101))
        assert len(job.succeeded) < 151  # batches that started before the stop arrived


def test_a_stop_kills_the_running_batch_after_the_drain_time() -> None:
    with running_job_worker(HANDLER) as worker:
        job = worker.submit([["sleep 60"]])
        worker.wait_for(lambda: "asleep in" in worker.log())
        worker.replica.command(command="stop", drain_s=0.3)
        worker.replica.process.wait(PATIENCE_S)
        assert job.resolved == 0


def test_a_stop_signal_from_the_operator_ends_the_replica() -> None:
    with running_job_worker(HANDLER) as worker:
        worker.wait_over(worker.submit([[1]]))
        worker.operator.change(stop=True)
        worker.replica.process.wait(PATIENCE_S)


def test_a_replica_unknown_to_the_operator_ends() -> None:
    with running_job_worker(HANDLER) as worker:
        wait_until(lambda: worker.operator.joins)
        worker.operator.change(refuse_with=404)
        worker.operator.die()
        worker.operator.start()
        worker.replica.process.wait(PATIENCE_S)


def test_an_outdated_worker_process_is_replaced() -> None:
    with running_job_worker(HANDLER) as worker:
        wait_until(lambda: worker.operator.joins)
        worker.operator.change(refuse_with=409)
        worker.operator.die()
        worker.operator.start()
        worker.replica.wait_state(ProcessState.BACKING_OFF)
        worker.operator.change(refuse_with=None)
        worker.wait_over(worker.submit([[1]]))


def test_a_worker_ends_when_its_supervisor_is_killed() -> None:
    with running_job_worker(HANDLER) as worker:
        wait_until(lambda: worker.operator.joins)
        pid = worker.replica.pid
        os.kill(worker.replica.process.pid, signal.SIGKILL)
        wait_until(lambda: has_ended(pid))


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_a_while(worker: JobReplica, seconds: float) -> None:
    """Wait without a condition, to measure that nothing happens."""
    assert worker.replica.process.poll() is None
    threading.Event().wait(seconds)
