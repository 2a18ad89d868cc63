"""Responses of real replicas with models: predictions, `model_metadata` and errors."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.models.spec import Catalogue, Layout, Model, ModelPath, ModelSource, Version
from harness.models.model_makers import onnx_model
from harness.models.scripted_agents import ScriptedAgent, scripted_agent
from harness.replicas.replicas import Replica, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

PYTHON = """
    import os, time

    class PythonPredictor:
        def __init__(self, config, python_client):
            self.client = python_client

        def load_model(self, model_path):
            text = open(model_path + "/model.txt").read()
            if text == "broken":
                raise ValueError("bad weights")
            if text.startswith("/"):
                open(text + ".waiting", "w").close()
            while text.startswith("/") and not os.path.exists(text):
                time.sleep(0.01)
            return text

        def predict(self, payload):
            return {"model": self.client.get_model(**payload)}
"""
ONNX = """
    class ONNXPredictor:
        def __init__(self, onnx_client, config):
            self.client = onnx_client

        def predict(self, payload, query_params):
            return self.client.predict(payload, **query_params)[0].tolist()
"""


@pytest.fixture
def agent() -> Iterator[ScriptedAgent]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, scripted_agent(Path(folder)) as agent:
        yield agent


def source_of(layout: Layout, **fields: int) -> ModelSource:
    return ModelSource(layout, (ModelPath("a", "/nowhere/a"), ModelPath("b", "/nowhere/b")), **fields)


def onnx_version(agent: ScriptedAgent, digest: str, number: int) -> Version:
    version = agent.content(digest, "")
    assert version.path is not None
    (Path(version.path) / "model.onnx").write_bytes(onnx_model(number)["model.onnx"])
    return version


def test_a_model_error_is_sent_to_the_caller_and_logged_with_the_users_frames(agent: ScriptedAgent) -> None:
    broken = replace(agent.content("b1", "broken"), number="1")
    good = replace(agent.content("a2", "two"), number="2")
    agent.announce(Catalogue((Model("a", (broken, good)),)))
    with running_replica(PYTHON, "predictor", models=source_of("python"), model_agent_socket=agent.socket) as replica:
        replica.wait_ready()
        assert replica.request({"model_name": "a"}).json == {"model": "two"}
        for payload, message in [
            ({}, "model_name was not specified, choose one of the following: ['a', 'b']"),
            ({"model_name": "x"}, "'x' model wasn't found in the list of available models: ['a', 'b']"),
            ({"model_name": "b"}, "'b' model's versions have been removed; add at least a version to serve it"),
            (
                {"model_name": "a", "model_version": "1"},
                "failed (re-)loading model a of version 1: ValueError: bad weights",
            ),
        ]:
            answer = replica.request(payload)
            assert answer.status == 500
            assert answer.json["error"] == f"internal server error: {message}"
        wait_until(lambda: replica.log().endswith("ValueError: bad weights\n"))
        log = replica.log()
        assert 'File "handler.py", line 19, in predict' in log
        assert 'File "handler.py", line 11, in load_model' in log
        assert log.count("The above exception was the direct cause") == 1
        assert all(name not in log for name in ("cortex/models", "cortex/predictor", "contextlib.py"))
        metadata = replica.request(method="GET").json["model_metadata"]
        assert metadata == {
            "a": {"versions": ["1", "2"], "timestamps": [int(broken.modified_at), int(good.modified_at)]}
        }


@pytest.mark.parametrize("is_cached", [False, True])
def test_an_onnx_predictor_returns_predictions_and_metadata(agent: ScriptedAgent, is_cached: bool) -> None:
    a = onnx_version(agent, "a1", 1)
    b = onnx_version(agent, "b1", 5)
    if is_cached:
        a, b = replace(a, path=None), replace(b, path=None)
    agent.announce(Catalogue((Model("a", (a,)), Model("b", (b,)))))
    limits = {"cache_size": 1, "disk_cache_size": 2} if is_cached else {}
    source = source_of("onnx", **limits)
    fields = {"type": "onnx", "models": source, "model_agent_socket": agent.socket}
    with running_replica(ONNX, "predictor", **fields) as replica:
        replica.wait_ready()
        assert replica.request([1.5, 2], path="/?model_name=a").json == [2.5, 3]
        assert replica.request({"x": 1}, path="/?model_name=b&model_version=1").json == [6]
        assert replica.request([1.5, 2], path="/?model_name=a").json == [2.5, 3]
        answer = replica.request([[1], [2, 3]], path="/?model_name=a")
        assert answer.status == 500
        assert "input 'x' of model 'a' of version 1 must be float32 of shape [?]" in answer.json["error"]
        assert "ragged" in answer.json["error"]
        metadata = replica.request(method="GET").json["model_metadata"]
        assert metadata["a"]["input_signatures"] == {"x": {"shape": ["n"], "type": "float32"}}
        assert metadata["b"]["versions"] == ["1"]


def test_loading_a_model_for_a_call_does_not_block_other_threads(agent: ScriptedAgent, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    models = Model("a", (agent.content("a1", "hot"),)), Model("b", (agent.content("b1", str(gate)),))
    agent.announce(Catalogue(models))
    fields = {"models": source_of("python", cache_size=2), "model_agent_socket": agent.socket, "threads": 2}

    def ask(running: Replica, name: str) -> str:
        return str(running.request({"model_name": name}).json["model"])

    with running_replica(PYTHON, "predictor", **fields) as running:
        running.wait_ready()
        for _ in range(150):  # quick enough to run on the event loop
            assert ask(running, "a") == "hot"
        answers: list[str] = []
        cold = threading.Thread(target=lambda: answers.append(ask(running, "b")), daemon=True)
        cold.start()
        wait_until(Path(f"{gate}.waiting").exists)
        assert ask(running, "a") == "hot"
        assert not answers
        gate.touch()
        cold.join()
        assert answers == [str(gate)]
