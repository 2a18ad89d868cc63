"""Replicas with `handler.preload`: one construction, forked workers, and the deaths of each process."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cortex.lifecycle import DeathCause, ProcessState
from cortex.worker.spec import ReplicaStatus
from cortex.worker.working_copy import copies_folder
from harness.replicas.replicas import Replica, running_replica
from harness.wait import PATIENCE_S, has_ended, wait_until

pytestmark = pytest.mark.processes

HANDLER = """
    import os, pathlib, random, subprocess, sys, time
    import numpy

    class Handler:
        def __init__(self, config):
            self.config = config
            print("constructed", os.environ.get("CORTEX_PROCESS_INDEX"), flush=True)
            self.weights = numpy.random.rand(config.get("mb", 1), 131072)
            self.forked, self.fork_server = [], os.getpid()
            pathlib.Path("written.txt").write_text("by __init__")
            if "fails while" in config and pathlib.Path(config["fails while"]).exists():
                raise ValueError("no weights")

        def after_fork(self):
            self.forked.append(os.environ["CORTEX_PROCESS_INDEX"])
            if "after_fork fails once" in self.config:
                path = pathlib.Path(self.config["after_fork fails once"])
                if not path.exists():
                    path.touch()
                    raise ConnectionError("no connection")

        def handle_post(self, payload):
            do = payload.get("do")
            if do:
                print("begun", flush=True)
            if do == "wait":
                while not os.path.exists(payload["for"]):
                    time.sleep(0.01)
            elif do == "sleep":
                time.sleep(payload["s"])
            elif do == "exit":
                os._exit(3)
            elif do == "allocate":
                self.hoard = bytearray(os.urandom(1)) * (payload["mib"] * 1024 * 1024)
                time.sleep(10)
            elif do == "spawn":
                return subprocess.Popen(["sleep", "600"]).pid
            elif do == "leave a process behind":
                return int(subprocess.check_output(
                    [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '0.2'], stdout=2).pid)"]
                ))
            return {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "forked": self.forked,
                "fork server": self.fork_server,
                "sum": float(self.weights.sum()),
                "random": [random.random(), numpy.random.random()],
                "written": pathlib.Path("written.txt").read_text(),
            }
"""


def fork_server(replica: Replica) -> psutil.Process:
    return psutil.Process(replica.request({}).json["fork server"])


def pids(status: ReplicaStatus) -> list[int | None]:
    return [process.pid for process in status.processes]


def in_background(pool: ThreadPoolExecutor, replica: Replica, payload: object, index: int = 0):
    """Send a request; return its future once user code has received it."""
    before = replica.log().count("begun")
    future = pool.submit(replica.request, payload, index=index)
    wait_until(lambda: replica.log().count("begun") > before, message=replica.log())
    return future


def test_workers_are_forked_from_one_construction_and_are_children_of_the_supervisor() -> None:
    with running_replica(HANDLER, processes=3, preload=True, config={"mb": 64}) as replica:
        status = replica.wait_ready()
        answers = [replica.request({}, index=index).json for index in range(3)]
        wait_until(lambda: replica.log().count("constructed None") == 1)
        assert [each["forked"] for each in answers] == [["0"], ["1"], ["2"]]
        assert [each["pid"] for each in answers] == pids(status)
        assert {each["parent"] for each in answers} == {status.supervisor_pid}
        assert len({each["sum"] for each in answers}) == 1
        assert len({tuple(each["random"]) for each in answers}) == 3
        assert {each["written"] for each in answers} == {"by __init__"}
        used = sum(psutil.Process(pid).memory_full_info().pss for pid in [*pids(status), fork_server(replica).pid])
        alone = psutil.Process(pids(status)[0]).memory_info().rss
        assert used < 1.6 * alone


def test_a_worker_that_dies_is_named_and_forked_again_without_a_construction() -> None:
    with running_replica(HANDLER, processes=2, preload=True) as replica, ThreadPoolExecutor() as pool:
        before = replica.wait_ready()
        answer = replica.request({"do": "exit"}, index=1)
        assert answer.status == 500
        assert "exited with code 3" in answer.json["error"]
        again = wait_until(lambda: (found := replica.request({}, index=1).json)["pid"] not in pids(before) and found)
        assert again is not None
        inside = in_background(pool, replica, {"do": "sleep", "s": 60})
        child = replica.request({"do": "spawn"}, index=1).json
        os.kill(pids(replica.status())[0] or 0, signal.SIGKILL)
        assert "killed (SIGKILL)" in inside.result(PATIENCE_S).json["error"]
        os.kill(again["pid"], signal.SIGSEGV)
        status = wait_until(lambda: (s := replica.wait_ready()).processes[1].restarts == 2 and s)
        assert status is not None
        assert status.processes[1].death is not None
        assert status.processes[1].death.cause is DeathCause.SEGMENTATION_FAULT
        wait_until(lambda: has_ended(child))
        wait_until(lambda: replica.log().count("constructed") == 1)


def test_workers_outlive_the_fork_server_which_is_started_when_one_has_to_be_replaced(tmp_path: Path) -> None:
    with running_replica(HANDLER, processes=2, preload=True) as replica, ThreadPoolExecutor() as pool:
        before = replica.wait_ready()
        server = fork_server(replica)
        inside = in_background(pool, replica, {"do": "wait", "for": str(tmp_path / "go")})
        server.kill()
        wait_until(lambda: f"process {server.pid} killed (SIGKILL)" in replica.log())
        assert replica.request({}, index=1).json["written"] == "by __init__"
        assert pids(replica.status()) == pids(before)
        wait_until(lambda: replica.log().count("constructed") == 1)
        assert replica.request({"do": "exit"}, index=1).status == 500
        assert replica.request({}, index=1).json["pid"] not in pids(before)
        wait_until(lambda: replica.log().count("constructed") == 2)
        (tmp_path / "go").touch()
        assert inside.result(PATIENCE_S).json["pid"] == before.processes[0].pid
        # The working copy of the first fork server is removed with the last of its workers.
        first = copies_folder(replica.spec.run_dir, server.pid)
        assert first.exists()
        assert replica.request({"do": "exit"}).status == 500
        assert replica.request({}).status == 200
        wait_until(lambda: not first.exists())


def test_workers_answer_their_requests_after_the_death_of_the_supervisor_and_end() -> None:
    with running_replica(HANDLER, processes=2, preload=True) as replica, ThreadPoolExecutor() as pool:
        status = replica.wait_ready()
        server = fork_server(replica)
        inside = in_background(pool, replica, {"do": "sleep", "s": 60})
        replica.process.kill()
        assert "the supervisor of its replica died" in inside.result(PATIENCE_S).json["error"]
        wait_until(lambda: all(has_ended(pid) for pid in [server.pid, *pids(status)] if pid))


def test_a_class_that_cannot_be_constructed_is_the_failure_of_each_process_until_it_can(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    with running_replica(HANDLER, processes=2, preload=True, config={"fails while": str(broken)}) as replica:
        status = replica.wait_state(ProcessState.BACKING_OFF)
        for process in status.processes:
            assert process.failure is not None
            assert process.failure.message == "ValueError: no weights"
            assert "in __init__" in process.failure.traceback
        answer = replica.request({})
        assert answer.status == 503
        reason = f"ValueError while it started; `cortex get {replica.spec.api}` shows why"
        assert answer.json["error"] == f"no replica is ready: {reason}"
        broken.unlink()
        replica.wait_ready()
        assert replica.request({}, index=1).status == 200


def test_a_fork_server_that_is_killed_while_it_constructs_is_the_death_of_each_process() -> None:
    source = "import os, signal\nclass Handler:\n    def __init__(self, config): os.kill(os.getpid(), signal.SIGKILL)\n"
    source += "    def handle_post(self, payload): return payload\n"
    with running_replica(source, preload=True, processes=2) as replica:
        for process in replica.wait_state(ProcessState.BACKING_OFF).processes:
            assert process.death is not None and process.failure is not None
            assert process.death.cause is DeathCause.KILLED
            assert process.death.message in process.failure.message


def test_the_class_is_constructed_again_if_no_process_becomes_ready(tmp_path: Path) -> None:
    config = {"after_fork fails once": str(tmp_path / "failed")}
    with running_replica(HANDLER, preload=True, config=config) as replica:
        replica.wait_ready()
        wait_until(lambda: "ConnectionError: no connection" in replica.log())
        assert replica.request({}).json["forked"] == ["0"]
        wait_until(lambda: replica.log().count("constructed") == 2)


def test_the_memory_limit_counts_shared_memory_by_its_share() -> None:
    limit = 400 * 1024 * 1024
    with running_replica(HANDLER, processes=4, preload=True, config={"mb": 200}, mem_limit_bytes=limit) as replica:
        status = replica.wait_ready()
        assert replica.request({}).status == 200
        answer = replica.request({"do": "allocate", "mib": 500})
        assert answer.status == 500
        assert "out of memory" in answer.json["error"]
        assert "mem_limit is 400 MiB" in answer.json["error"]
        assert replica.request({}).json["pid"] != status.processes[0].pid
        wait_until(lambda: replica.log().count("constructed") == 1)


def test_processes_that_user_code_leaves_behind_do_not_become_zombies() -> None:
    with running_replica(HANDLER, preload=True) as replica:
        status = replica.wait_ready()
        pid = replica.request({"do": "leave a process behind"}).json
        wait_until(lambda: not psutil.pid_exists(pid))
        assert psutil.Process(status.supervisor_pid).is_running()


def test_a_stop_drains_the_workers_and_ends_the_fork_server(tmp_path: Path) -> None:
    with running_replica(HANDLER, processes=2, preload=True) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        server = fork_server(replica)
        inside = in_background(pool, replica, {"do": "wait", "for": str(tmp_path / "go")})
        replica.command(command="stop", drain_s=30)
        wait_until(lambda: has_ended(server.pid))
        (tmp_path / "go").touch()
        assert inside.result(PATIENCE_S).status == 200
        assert replica.process.wait(PATIENCE_S) == 0


def test_threads_that_do_not_survive_the_fork_are_named_in_the_log() -> None:
    source = """
        import threading, time

        class Handler:
            def __init__(self, config):
                threading.Thread(target=self.refresh, name="refresh", daemon=True).start()

            def refresh(self):
                time.sleep(3600)

            def handle_post(self, payload):
                return threading.active_count()
    """
    with running_replica(source, preload=True) as replica:
        replica.wait_ready()
        assert replica.request({}).status == 200
        found = [line for line in replica.log().splitlines() if "warning: preload" in line]
        assert len(found) == 1
        words = 'the thread "refresh" (handler.py:9) does not run in the processes; start it in after_fork(self)'
        assert words in found[0]


def test_an_application_is_constructed_before_the_fork_and_started_after_it() -> None:
    source = """
        import contextlib, os
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        class Handler:
            def __init__(self, config):
                self.pids = {"constructed": os.getpid()}
                self.app = Starlette(routes=[Route("/", self.answer)], lifespan=self.lifespan)

            def after_fork(self):
                self.pids["forked"] = os.getpid()

            @contextlib.asynccontextmanager
            async def lifespan(self, app):
                self.pids["started"] = os.getpid()
                yield

            async def answer(self, request):
                return JSONResponse(self.pids)
    """
    with running_replica(source, processes=2, preload=True, type="asgi") as replica:
        status = replica.wait_ready()
        answers = [replica.request(method="GET", index=index).json for index in range(2)]
        assert [each["forked"] for each in answers] == [each["started"] for each in answers] == pids(status)
        assert len({each["constructed"] for each in answers} - set(pids(status))) == 1
