"""Model rollouts with real supervisors and workers, and a scripted model agent."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cortex.lifecycle import ProcessState
from cortex.models.spec import Catalogue, Model, ModelSource
from harness.models.scripted_agents import ScriptedAgent, catalogue, scripted_agent
from harness.replicas.reloading_replicas import model_of, problems, replica
from harness.replicas.replicas import running_replica
from harness.wait import PATIENCE_S, has_ended, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def agent() -> Iterator[ScriptedAgent]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, scripted_agent(Path(folder)) as agent:
        yield agent


def test_a_new_version_gets_a_new_worker_and_running_requests_finish_on_the_old(
    agent: ScriptedAgent, tmp_path: Path
) -> None:
    first = agent.content("a", "one")
    agent.announce(catalogue(first))
    with replica(agent) as running:
        running.wait_ready()
        pid, gate, answers = running.pid, tmp_path / "gate", []
        slow = threading.Thread(target=lambda: answers.append(running.request({"wait_for": str(gate)})), daemon=True)
        slow.start()
        wait_until(lambda: (tmp_path / "gate.inside").exists())
        agent.announce(catalogue(first, replace(agent.content("b", "two"), number="2")))
        wait_until(lambda: running.pid != pid)
        assert model_of(running) == "two"
        assert model_of(running, version="1") == "one"
        gate.touch()
        slow.join(PATIENCE_S)
        assert answers[0].json == {"model": "one", "same": True, "pid": pid}
        wait_until(lambda: has_ended(pid))
        assert running.status().processes[0].restarts == 0


def test_only_older_versions_named_by_calls_stay_loaded(agent: ScriptedAgent) -> None:
    versions = [agent.content("a", "one"), replace(agent.content("b", "two"), number="2")]
    agent.announce(catalogue(*versions))
    with replica(agent) as running:
        running.wait_ready()
        assert model_of(running, version="1") == "one"
        versions.append(replace(agent.content("c", "three"), number="3"))
        agent.announce(catalogue(*versions))
        wait_until(lambda: model_of(running) == "three")
        wait_until(
            lambda: [shown.version for shown in running.status().models.versions if shown.is_loaded] == ["1", "3"]
        )


def test_an_unloadable_older_version_does_not_block_a_newer_one(agent: ScriptedAgent) -> None:
    old, two = agent.content("a", "one"), replace(agent.content("b", "two"), number="2")
    agent.announce(catalogue(old, two))
    with replica(agent) as running:
        running.wait_ready()
        assert model_of(running, version="1") == "one"
        broken = replace(agent.content("c", "raise"), number="1")
        agent.announce(catalogue(broken, two, replace(agent.content("d", "three"), number="3")))
        wait_until(lambda: model_of(running) == "three")
        assert running.request({"version": "1"}).status == 500
        wait_until(lambda: "bad weights" in problems(running).get("1", ""))


def test_survives_an_unwritable_run_directory(agent: ScriptedAgent) -> None:
    first = agent.content("a", "one")
    agent.announce(catalogue(first))
    with replica(agent) as running:
        running.wait_ready()
        pid = running.pid
        obstacles = [Path(running.spec.run_dir, f"catalogue-{number}.json") for number in range(2, 100)]
        for path in obstacles:
            path.mkdir()
        agent.announce(catalogue(first, replace(agent.content("b", "two"), number="2")))
        wait_until(lambda: running.pid != pid)
        assert model_of(running) == "two"
        agent.announce(catalogue(first))
        wait_until(lambda: model_of(running) == "one")
        agent.announce(catalogue(first, replace(agent.content("b", "two"), number="0")))
        wait_until(lambda: len(running.status().models.versions) == 2)
        assert running.request({"version": "0"}).status == 500  # the worker cannot be notified yet
        for path in obstacles:
            path.rmdir()
        wait_until(lambda: running.request({"version": "0"}).status == 200)


def test_an_error_that_utf8_cannot_encode_is_reported(agent: ScriptedAgent) -> None:
    first = agent.content("a", "one")
    agent.announce(catalogue(first))
    with replica(agent) as running:
        running.wait_ready()
        old = replace(agent.content("c", "surrogate"), number="0")
        agent.announce(catalogue(old, first, replace(agent.content("b", "surrogate"), number="2")))
        wait_until(lambda: "ValueError" in problems(running).get("2", ""))
        assert running.request({"version": "0"}).status == 500
        wait_until(lambda: "ValueError" in problems(running).get("0", ""))
        shown = running.status().models
        assert shown is not None
        for problem in shown.problems:
            (problem.message + problem.detail).encode()


def test_a_candidate_is_loaded_but_served_only_once_it_is_confirmed(agent: ScriptedAgent) -> None:
    first, second = agent.content("a", "one"), agent.content("b", "two")
    agent.announce(catalogue(first))
    with replica(agent) as running:
        running.wait_ready()
        agent.announce(catalogue(first), catalogue(second))
        wait_until(lambda: "b" in set().union(*agent.using.values()))
        wait_until(lambda: running.status().models.is_loading)
        assert model_of(running) == "one"
        agent.announce(catalogue(first), catalogue(agent.content("c", "three")))
        wait_until(lambda: "c" in set().union(*agent.using.values()))
        assert model_of(running) == "one"
        agent.announce(catalogue(agent.content("c", "three")))
        wait_until(lambda: model_of(running) == "three")
        wait_until(lambda: set().union(*agent.using.values()) == {"c"})


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_request_fails_while_models_change_under_load(agent: ScriptedAgent, processes: int) -> None:
    agent.announce(catalogue(agent.content("d0", "0")))
    with replica(agent, processes=processes, threads=2) as running:
        running.wait_ready()
        stop, bad, count = threading.Event(), [], [0]

        def ask(index: int) -> None:
            connection, seen = running.connection(index % processes), 0
            while not stop.is_set():
                connection.request("POST", "/", b"{}", {"content-type": "application/json"})
                response = connection.getresponse()
                body = json.loads(response.read())
                if response.status != 200 or not body["same"] or int(body["model"]) < seen:
                    bad.append(body)
                seen = int(body["model"])
                count[0] += 1

        threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(8)]
        for thread in threads:
            thread.start()
        for number in range(1, 9):
            agent.announce(catalogue(agent.content(f"d{number}", str(number))))
            wait_until(lambda number=number: model_of(running) == str(number), timeout_s=20)
            known = count[0]
            wait_until(lambda known=known: count[0] > known + 50 or bad)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not bad


@pytest.mark.parametrize(
    ("text", "expected"),
    [("raise", "ValueError: bad weights"), ("crash", "segmentation fault")],
)
def test_an_unloadable_version_leaves_the_old_one_serving(agent: ScriptedAgent, text: str, expected: str) -> None:
    first = agent.content("a", "one")
    agent.announce(catalogue(first))
    with replica(agent) as running:
        running.wait_ready()
        pid = running.pid
        agent.announce(catalogue(first, replace(agent.content("b", text), number="2")))
        wait_until(lambda: expected in problems(running).get("2", ""))
        assert model_of(running) == "one"
        assert running.pid == pid
        agent.announce(catalogue(first, replace(agent.content("c", "three"), number="3")))
        wait_until(lambda: model_of(running) == "three")
        assert problems(running) == {}


def test_a_killed_standby_is_retried_soon(agent: ScriptedAgent, tmp_path: Path) -> None:
    first = agent.content("a", "one")
    agent.announce(catalogue(first))
    with replica(agent) as running:
        running.wait_ready()
        supervisor = psutil.Process(running.status().supervisor_pid)
        before = {child.pid for child in supervisor.children()}
        agent.announce(catalogue(first), catalogue(agent.content("b", "two")))
        standby = wait_until(lambda: {child.pid for child in supervisor.children()} - before).pop()
        os.kill(standby, signal.SIGKILL)
        # If the version were confirmed earlier, the dead standby would take over and be replaced like a serving worker.
        wait_until(lambda: has_ended(standby))
        agent.announce(catalogue(agent.content("b", "two")))
        wait_until(lambda: "killed" in problems(running).get("1", ""))
        assert model_of(running) == "one"
        wait_until(lambda: model_of(running) == "two", timeout_s=20)
        wait_until(lambda: problems(running) == {})


def test_requests_of_a_retiring_worker_use_no_slot_of_its_successor(agent: ScriptedAgent, tmp_path: Path) -> None:
    agent.announce(catalogue(agent.content("a", "one")))
    with replica(agent) as running:
        running.wait_ready()
        gate = tmp_path / "gate"
        slow = threading.Thread(target=lambda: running.request({"wait_for": str(gate)}), daemon=True)
        slow.start()
        wait_until(lambda: (tmp_path / "gate.inside").exists())
        wait_until(
            lambda: running.status().processes[0].lent == 0
        )  # else its head was slow to arrive, at the last tick
        agent.announce(catalogue(agent.content("b", "two")))
        wait_until(lambda: running.status().processes[0].lent == 1)
        assert model_of(running) == "two"
        gate.touch()
        slow.join(PATIENCE_S)
        wait_until(lambda: running.status().processes[0].lent == 0)


def test_a_version_that_never_finishes_loading_is_superseded_by_the_next(agent: ScriptedAgent) -> None:
    first = agent.content("a", "one")
    agent.announce(catalogue(first))
    with replica(agent) as running:
        running.wait_ready()
        agent.announce(catalogue(first, replace(agent.content("b", "hang"), number="2")))
        wait_until(lambda: running.status().models.is_loading)
        assert model_of(running) == "one"
        agent.announce(catalogue(first, replace(agent.content("c", "three"), number="3")))
        wait_until(lambda: model_of(running) == "three")


def test_survives_a_restart_of_the_agent(agent: ScriptedAgent) -> None:
    agent.announce(catalogue(agent.content("a", "one")))
    with replica(agent) as running:
        running.wait_ready()
        agent.stop()
        agent.start()
        wait_until(lambda: len(agent.watches) == 2)
        agent.announce(catalogue(agent.content("b", "two")))
        wait_until(lambda: model_of(running) == "two")


def test_a_removed_version_is_not_found_without_a_new_process(agent: ScriptedAgent) -> None:
    second = replace(agent.content("b", "two"), number="2")
    agent.announce(catalogue(agent.content("a", "one"), second))
    with replica(agent) as running:
        running.wait_ready()
        pid = running.pid
        assert model_of(running, version="1") == "one"
        agent.announce(catalogue(second))
        wait_until(lambda: running.request({"version": "1"}).status == 500)
        assert model_of(running) == "two"
        assert running.pid == pid


def test_an_unreachable_source_is_reported_while_its_last_models_are_served(agent: ScriptedAgent) -> None:
    first = catalogue(agent.content("a", "one"))
    agent.announce(first)
    with replica(agent) as running:
        running.wait_ready()
        agent.announce(first, error="s3://b/m: the store can't be reached")
        wait_until(lambda: "can't be reached" in problems(running).get(None, ""))
        assert model_of(running) == "one"
        agent.announce(first)
        wait_until(lambda: problems(running) == {})


# Models at the start of a replica.


def test_a_replica_waits_for_its_first_catalogue(agent: ScriptedAgent) -> None:
    with replica(agent) as running:
        assert running.status().processes[0].state is ProcessState.STARTING
        agent.announce(catalogue(agent.content("a", "one")))
        running.wait_ready()
        assert model_of(running) == "one"
        shown = running.status().models
        assert shown is not None and shown.versions[0].is_latest and shown.versions[0].is_loaded


def test_a_replica_that_falls_back_to_the_version_before_has_not_failed(agent: ScriptedAgent, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    versions = [replace(agent.content("a", str(gate)), number="1"), replace(agent.content("b", "raise"), number="2")]
    agent.announce(catalogue(*versions))
    with replica(agent) as running:
        wait_until(lambda: "bad weights" in problems(running).get("2", ""))
        process = running.status().processes[0]
        assert (process.state, process.failed_starts, process.failure) == (ProcessState.STARTING, 0, None)
        gate.touch()
        running.wait_ready()
        assert model_of(running) == str(gate)


def test_a_replica_without_a_loadable_version_reports_why_and_starts_once_there_is_one(agent: ScriptedAgent) -> None:
    agent.announce(catalogue(agent.content("a", "raise")))
    with replica(agent) as running:
        failed = running.wait_state(ProcessState.BACKING_OFF).processes[0].failure
        assert failed is not None and "bad weights" in failed.message
        answer = running.request({}).json["error"]
        assert answer == f"no replica is ready: {failed.summary}; `cortex get {running.spec.api}` shows why"
        assert "bad weights" not in failed.summary
        agent.announce(catalogue(agent.content("b", "two")))
        running.wait_ready()
        assert model_of(running) == "two"


def test_a_broken_model_does_not_prevent_a_start_with_the_others(agent: ScriptedAgent) -> None:
    good, broken = agent.content("a", "one"), agent.content("b", "raise")
    agent.announce(Catalogue((Model("broken", (broken,)), Model("good", (good,)))))
    source = """
        class Handler:
            def __init__(self, config, model_client):
                self.client = model_client
            def load_model(self, model_path):
                text = open(model_path + "/model.txt").read()
                assert text != "raise", "bad weights"
                return text
            def handle_post(self, payload):
                return self.client.get_model(payload["model"])
    """
    folder = ModelSource("python", dir="/nowhere")
    with running_replica(source, models=folder, model_agent_socket=agent.socket) as running:
        running.wait_ready()
        assert running.request({"model": "good"}).body == b"one"
        answer = running.request({"model": "broken"})
        assert answer.status == 500 and b"broken" in answer.body
        assert "bad weights" in problems(running)["1"]


def test_a_killed_worker_is_replaced_with_the_same_models(agent: ScriptedAgent) -> None:
    first = agent.content("a", "one")
    agent.announce(catalogue(first, replace(agent.content("b", "two"), number="2")))
    with replica(agent) as running:
        running.wait_ready()
        assert model_of(running, version="1") == "one"
        agent.stop()
        pid = running.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: running.pid not in (pid, None))
        running.wait_ready()
        assert model_of(running) == "two"
        assert model_of(running, version="1") == "one"


def test_a_replica_stops_while_it_waits_for_models(agent: ScriptedAgent) -> None:
    with replica(agent) as running:
        wait_until(lambda: agent.watches)
        running.command(command="stop", drain_s=1)
        assert running.process.wait(60) == 0
