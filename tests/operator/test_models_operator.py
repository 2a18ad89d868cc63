"""A real operator with a model agent."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cortex.client.cleanup import inspect_processes, stop_all
from harness.installations.running import RunningOperator, config, project
from harness.wait import has_ended, wait_until

pytestmark = pytest.mark.processes

PREDICTOR = """
import pathlib
class PythonPredictor:
    def __init__(self, python_client, config):
        self.client = python_client
    def load_model(self, model_path):
        text = pathlib.Path(model_path, "number").read_text()
        if text == "bad":
            raise ValueError("bad weights")
        return int(text)
    def predict(self, payload):
        return {"number": self.client.get_model()}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model's folder with version 1."""
    put(tmp_path / "iris", 1, "1")
    return tmp_path / "iris"


def put(source: Path, version: int, text: str) -> None:
    folder = source.parent / "upload"
    folder.mkdir()
    (folder / "number").write_text(text)
    source.mkdir(exist_ok=True)
    folder.rename(source / str(version))  # at once: the agent must not find an empty file


def yaml(source: Path, extra: str = "") -> str:
    return f"""
- name: iris
  kind: RealtimeAPI
  predictor:
    type: python
    path: handler.py
    multi_model_reloading: {{path: {source}, poll_interval: 1s}}
{extra}
"""


def agent_pid(operator: RunningOperator) -> int | None:
    models = operator.call("GET", "/v1/status")[1]["models"]
    return models["pid"] if models else None


def latest(operator: RunningOperator) -> list[tuple[str, int]]:
    models: dict[str, Any] = operator.api()["models"]
    return [(row["version"], row["loaded"]) for row in models["versions"] if row["is_latest"]]


def test_shows_models_reloads_them_and_reports_their_problems(operator: RunningOperator, source: Path) -> None:
    operator.deploy(yaml(source), PREDICTOR)
    answer = operator.wait()
    assert answer["status"]["status_code"] == "live"
    assert list(answer["realtime_model_metadata"]) == ["_cortex_default"]
    wait_until(lambda: latest(operator) == [("1", 1)], message="version 1 shown")
    put(source, 2, "2")
    wait_until(lambda: latest(operator) == [("2", 1)], message="version 2 shown")
    assert operator.predict({})[1] == {"number": 2}
    put(source, 3, "bad")
    wait_until(lambda: operator.api()["models"]["problems"], message="problem told")
    (problem,) = operator.api()["models"]["problems"]
    assert problem["version"] == "3"
    assert problem["since"]
    assert "bad weights" in problem["message"]
    assert operator.predict({})[1] == {"number": 2}


def test_the_model_agent_outlives_the_operator_until_shutdown(own_operator: RunningOperator, source: Path) -> None:
    operator = own_operator
    assert agent_pid(operator) is None
    operator.deploy(yaml(source), PREDICTOR)
    operator.wait()
    wait_until(lambda: agent_pid(operator), message="agent runs")
    pid = agent_pid(operator)
    assert pid is not None
    operator.end(signal.SIGKILL)
    assert inspect_processes(operator.home)["models"] == {"pid": pid}
    operator.start()
    assert agent_pid(operator) == pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: agent_pid(operator) not in (None, pid), message="another agent runs")
    agent = agent_pid(operator)
    operator.end(signal.SIGKILL)
    assert stop_all(operator.home)
    # It was killed, at the lowest priority; its parent is gone, so a zombie may be left.
    wait_until(lambda: has_ended(agent), message="the agent ends")
    assert inspect_processes(operator.home)["models"] is None


def test_rejects_a_deploy_with_invalid_models_or_missing_devices(operator: RunningOperator, source: Path) -> None:
    text = yaml(source.parent / "gone", "  compute: {gpu: 99}\n")
    status, answer = operator.call("POST", "/v1/deploy", project(text, PREDICTOR))
    assert status == 400
    found = [(item["line"], item["path"], item["message"]) for item in answer["diagnostics"]]
    assert [(line, path) for line, path, _ in found] == [
        (7, "iris.predictor.multi_model_reloading.path"),
        (8, "iris.compute.gpu"),
    ]
    assert found[1][2].startswith("99: this machine has ")
    assert operator.call("GET", "/v1/apis")[1] == []


def test_shows_no_models_for_an_api_without(operator: RunningOperator) -> None:
    operator.deploy(config())
    assert operator.wait()["models"] is None
