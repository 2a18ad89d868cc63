"""Job workers with models, which the model agent provides once per worker."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from cortex.models.spec import DEFAULT_MODEL, ModelPath, ModelSource, Version
from harness.jobs.job_workers import running_job_worker
from harness.models.model_makers import onnx_model
from harness.models.scripted_agents import ScriptedAgent, catalogue, scripted_agent
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    class ONNXPredictor:
        def __init__(self, onnx_client, config, job_spec):
            self.client = onnx_client

        def predict(self, payload):
            return self.client.predict(payload)[0].tolist()
"""


@pytest.fixture
def agent() -> Iterator[ScriptedAgent]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, scripted_agent(Path(folder)) as agent:
        yield agent


def onnx_version(agent: ScriptedAgent, digest: str, number: int) -> Version:
    version = agent.content(digest, "")
    assert version.path is not None
    (Path(version.path) / "model.onnx").write_bytes(onnx_model(number)["model.onnx"])
    return replace(version, number=str(number))


def fields_of(agent: ScriptedAgent) -> dict[str, object]:
    source = ModelSource("onnx", (ModelPath(DEFAULT_MODEL, "/nowhere"),), is_live=False)
    return {"interface": "predictor", "type": "onnx", "models": source, "model_agent_socket": agent.socket}


def test_all_jobs_of_a_worker_have_the_same_models(agent: ScriptedAgent) -> None:
    agent.announce(catalogue(onnx_version(agent, "a", 1)))
    with running_job_worker(SOURCE, **fields_of(agent)) as worker:
        first = worker.submit([[1.0], [2.0]])
        worker.wait_over(first, 30)
        assert [orjson.loads(first.results[seq]) for seq in (0, 1)] == [[2.0], [3.0]]
        wait_until(lambda: worker.replica.status().models is not None)
        # Nobody lists a place that is not live again, but another agent may.
        agent.announce(catalogue(onnx_version(agent, "b", 5)))
        second = worker.submit([[1.0]], "job-2")
        worker.wait_over(second)
        assert orjson.loads(second.results[0]) == [2.0]
        assert worker.replica.status().processes[0].restarts == 0

        def versions() -> list[tuple[str, bool]]:
            models = worker.replica.status().models
            assert models is not None
            return [(version.version, version.is_loaded) for version in models.versions]

        wait_until(lambda: versions() == [("1", True)])  # the process of the next job loads them, too


def test_a_restarted_job_worker_has_the_same_models(agent: ScriptedAgent) -> None:
    agent.announce(catalogue(onnx_version(agent, "a", 1)))
    with running_job_worker(SOURCE, **fields_of(agent)) as worker:
        worker.wait_over(worker.submit([[1.0]]), 30)
        agent.announce(catalogue(onnx_version(agent, "b", 5)))
        os.kill(worker.wait_for_next_process(), signal.SIGKILL)
        second = worker.submit([[1.0]], "job-2")
        worker.wait_over(second, 30)
        assert orjson.loads(second.results[0]) == [2.0]
