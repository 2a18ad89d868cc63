"""Jobs of one worker: each has a process, module globals and a working copy of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import orjson
import psutil
import pytest

from cortex.worker.working_copy import copies_folder
from harness.jobs.job_workers import JobReplica, running_job_worker
from harness.replicas.scripted_operator import ScriptedJob
from harness.wait import has_ended, wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    import os, random, subprocess, sys, time
    import numpy

    RESULTS = []

    class Handler:
        def __init__(self, config):
            if config.get("wrong"):
                raise ValueError("wrong config")
            with open("model.pth", "a") as file:
                file.write(config.get("model", ""))
            with open("handler.py", "w") as file:
                file.write("not Python")

        def handle_batch(self, payload):
            if payload == "pid":
                return os.getpid()
            if payload == "start a process":
                return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
            if payload == "allocate":
                RESULTS.append(bytearray(os.urandom(1)) * (400 * 1024 * 1024))
                time.sleep(60)
            if payload == "wait":
                print("waits", flush=True)
                time.sleep(600)
            if payload == "end":
                os._exit(0)
            if payload == "random":
                return [random.random(), numpy.random.random()]
            if payload == "model":
                return open("model.pth").read()
            RESULTS.append(payload)

        def on_job_complete(self):
            print("sum", sum(RESULTS), flush=True)
"""


def run(worker: JobReplica, name: str, *batches: object, config: dict[str, str] | None = None) -> list[object]:
    job = worker.submit(batches, name, has_hook=True, config=config or {})
    worker.wait_over(job, 30)
    return results(job)


def results(job: ScriptedJob) -> list[object]:
    return [orjson.loads(job.results[seq]) if job.results.get(seq) else None for seq in range(len(job.payloads))]


def test_module_globals_and_files_of_a_job_do_not_reach_the_next_one() -> None:
    with running_job_worker(SOURCE) as worker:
        stored = (Path(worker.replica.spec.project_dir) / "handler.py").read_text()
        for number in range(3):
            assert run(worker, f"job-{number}", 1, 2, 3, "model", config={"model": f"m{number}"})[3] == f"m{number}"
            worker.wait_for(lambda number=number: "sum 6\n" in worker.log(f"job-{number}"))
        assert (Path(worker.replica.spec.project_dir) / "handler.py").read_text() == stored
        assert worker.replica.status().processes[0].restarts == 0


def test_each_job_has_a_process_and_random_numbers_of_its_own() -> None:
    with running_job_worker(SOURCE) as worker:
        found = [run(worker, f"job-{number}", "pid", "random") for number in range(3)]
        assert len({str(pid) for pid, _ in found}) == 3
        assert len({str(numbers) for _, numbers in found}) == 3
        assert all(not psutil.pid_exists(pid) for pid, _ in found[:-1] if isinstance(pid, int))


def test_processes_and_files_of_a_job_end_with_it() -> None:
    with running_job_worker(SOURCE) as worker:
        (started,) = run(worker, "job-1", "start a process")
        assert isinstance(started, int)
        wait_until(lambda: has_ended(started))
        copies = Path(worker.replica.spec.run_dir) / "copies"
        run(worker, "job-2", 1)
        wait_until(lambda: not list(copies.glob("*/job-1")))


def test_an_exit_in_a_batch_is_a_death_and_not_the_end_of_the_job() -> None:
    with running_job_worker(SOURCE) as worker:
        run(worker, "job-1", 1)
        job = worker.submit(["end", 1], "job-2")
        death = worker.wait_for(lambda: worker.replica.status().processes[0].deaths)[-1]
        assert (death.message, death.inside) == ("exited with code 0", "job-2:0")
        assert death.pid in worker.operator.joins
        worker.operator.give_back(job, fail=[0])
        worker.wait_over(job)
        assert job.succeeded == [1]


def test_a_killed_fork_server_takes_the_process_of_the_job_with_it() -> None:
    with running_job_worker(SOURCE) as worker:
        worker.submit(["wait"], "job-1")
        worker.wait_for(lambda: "waits" in worker.log())
        process = psutil.Process(worker.replica.pid)
        server = process.ppid()
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: has_ended(process.pid))
        death = worker.wait_for(lambda: worker.replica.status().processes[0].deaths)[-1]
        assert (death.pid, death.inside) == (process.pid, "job-1:0")
        wait_until(lambda: not copies_folder(worker.replica.spec.run_dir, server).exists())
