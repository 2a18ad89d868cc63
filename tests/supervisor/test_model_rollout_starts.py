"""With which models a replica starts; supervisors and workers are real, what the agent says is the test's."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.lifecycle import ProcessState
from cortex.models.spec import Catalogue, Model, ModelSource
from harness.models.scripted_agents import ScriptedAgent, catalogue, scripted_agent
from harness.replicas.reloading_replicas import model_of, problems, replica
from harness.replicas.replicas import running_replica
from harness.wait import wait_until


@pytest.fixture
def agent() -> Iterator[ScriptedAgent]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, scripted_agent(Path(folder)) as agent:
        yield agent


def test_a_replica_waits_for_its_first_catalogue(agent: ScriptedAgent) -> None:
    with replica(agent) as running:
        assert running.status().processes[0].state is ProcessState.STARTING
        agent.announce(catalogue(agent.content("a", "one")))
        running.wait_ready()
        assert model_of(running) == "one"
        shown = running.status().models
        assert shown is not None and shown.versions[0].is_latest and shown.versions[0].is_loaded


def test_a_replica_starts_with_the_newest_version_that_loads(agent: ScriptedAgent) -> None:
    versions = [replace(agent.content("a", "one"), number="1"), replace(agent.content("b", "raise"), number="2")]
    agent.announce(catalogue(*versions))
    with replica(agent) as running:
        running.wait_ready()
        assert model_of(running) == "one"
        assert "bad weights" in problems(running)["2"]


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


def test_a_replica_without_a_loadable_version_reports_why_and_starts_once_there_is_one(agent: ScriptedAgent) -> None:
    agent.announce(catalogue(agent.content("a", "raise")))
    with replica(agent) as running:
        failed = running.wait_state(ProcessState.BACKING_OFF).processes[0].failure
        assert failed is not None and "bad weights" in failed.message
        agent.announce(catalogue(agent.content("b", "two")))
        running.wait_ready()
        assert model_of(running) == "two"


def test_one_broken_model_of_a_folder_does_not_keep_the_others_from_starting(agent: ScriptedAgent) -> None:
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


def test_a_killed_process_comes_back_with_the_same_models(agent: ScriptedAgent) -> None:
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
