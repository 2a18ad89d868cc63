"""The classes of every generation run as jobs: as the documents list them, and with models that cortex loads."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.installations.batch_api import BatchApi
from harness.installations.installation import Installation
from harness.models.model_makers import MAKERS
from harness.wait import wait_until

#: The interface as version 0.20 lists it.
V20_PYTHON = """
    # initialization code and variables can be declared here in global scope

    class PythonPredictor:
        def __init__(self, config, job_spec):
            pass

        def predict(self, payload, batch_id):
            pass

        def on_job_complete(self):
            pass
"""
V20_TENSORFLOW = """
    class TensorFlowPredictor:
        def __init__(self, tensorflow_client, config, job_spec):
            self.client = tensorflow_client
            # Additional initialization may be done here
            self.config, self.job_spec = config, job_spec

        def predict(self, payload, batch_id):
            return {"y": self.client.predict({"x": payload})["y"], "batch_id": batch_id}

        def on_job_complete(self):
            open(self.config["folder"] + "/" + self.job_spec["job_id"] + ".end", "a").write("x")
"""
V20_ONNX = """
    class ONNXPredictor:
        def __init__(self, onnx_client, config, job_spec):
            self.client = onnx_client
            # Additional initialization may be done here
            self.config, self.job_spec = config, job_spec

        def predict(self, payload, batch_id):
            return {"y": self.client.predict(payload)[0], "batch_id": batch_id}

        def on_job_complete(self):
            open(self.config["folder"] + "/" + self.job_spec["job_id"] + ".end", "a").write("x")
"""


def with_api_spec(source: str) -> str:
    """Add to a listing the argument of versions before 0.19, and a use of it."""
    taken = source.replace("config, job_spec):", "config, api_spec, job_spec):")
    seen = 'assert api_spec["name"] == job_spec["api_name"] and api_spec["predictor"]["model_path"] == "models"'
    return taken.replace(
        "            self.config, self.job_spec", f"            {seen}\n            self.config, self.job_spec"
    )


V35_TENSORFLOW = (
    V20_TENSORFLOW.replace("class TensorFlowPredictor", "class Handler")
    .replace("def predict(", "def handle_batch(")
    .replace("self.client.handle_batch(", "self.client.predict(")
)


@dataclass(frozen=True)
class Generation:
    """A listing, and the way its version named a model."""

    name: str
    source: str
    section: str
    type: str
    models: Mapping[str, Any]


V18_PYTHON = V20_PYTHON.replace("config, job_spec", "config, api_spec, job_spec")
V35_PYTHON = V20_PYTHON.replace("PythonPredictor", "Handler").replace("predict(", "handle_batch(")
OLDER = {"model_path": "models"}
NEWER = {"models": {"path": "models"}}

#: TensorFlow takes seconds to start. Its clients in other kinds of APIs, and those of ONNX here, stand for these.
LONG = dict.fromkeys(("v18-tensorflow", "v20-tensorflow", "v35-tensorflow"), pytest.mark.long)
GENERATIONS = [
    Generation("v18-python", V18_PYTHON, "predictor", "python", {}),
    Generation("v20-python", V20_PYTHON, "predictor", "python", {}),
    Generation("v35-python", V35_PYTHON, "handler", "python", {}),
    Generation("v18-onnx", with_api_spec(V20_ONNX), "predictor", "onnx", OLDER),
    Generation("v20-onnx", V20_ONNX, "predictor", "onnx", NEWER),
    Generation("v18-tensorflow", with_api_spec(V20_TENSORFLOW), "predictor", "tensorflow", OLDER),
    Generation("v20-tensorflow", V20_TENSORFLOW, "predictor", "tensorflow", NEWER),
    Generation("v35-tensorflow", V35_TENSORFLOW, "handler", "tensorflow", NEWER),
]


def deployed(cortex: Installation, folder: Path, generation: Generation) -> BatchApi:
    project = folder / "project"
    project.mkdir()
    section: dict[str, Any] = {
        "type": generation.type,
        "path": "code.py",
        "config": {"folder": str(folder)},
        **generation.models,
    }
    if generation.type != "python":
        for version in (1, 2):
            for name, data in MAKERS[generation.type](version).items():
                path = project / "models" / str(version) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    spec = {"name": generation.name, "kind": "BatchAPI", generation.section: section}
    (project / "cortex.yaml").write_text(yaml.safe_dump([spec]))
    (project / "code.py").write_text(textwrap.dedent(generation.source))
    cortex.cortex("deploy", project, timeout_s=100)
    return BatchApi(cortex, generation.name, folder)


@pytest.mark.parametrize(
    "generation", [pytest.param(each, id=each.name, marks=LONG.get(each.name, ())) for each in GENERATIONS]
)
def test_class_of_any_generation_runs_as_a_job(generation: Generation, cortex: Installation, tmp_path: Path) -> None:
    api = deployed(cortex, tmp_path, generation)
    job = api.submit([1, 2, 3, 4, 5], batch_size=2)
    status = api.ended(job, timeout_s=80)
    assert status["total_batch_count"] == 3
    lines = api.results(job)
    if generation.type == "python":
        assert lines == []  # the listing's methods return nothing
    else:
        assert [line["result"]["y"] for line in lines] == [[3, 4], [5, 6], [7]]
        assert [line["result"]["batch_id"] for line in lines] == [line["batch_id"] for line in lines]
        assert (tmp_path / f"{job}.end").read_text() == "x"
    cortex.cortex("delete", generation.name, "-f")


COUNTING = """
    import os

    CONSTRUCTED = []

    class Handler:
        def __init__(self, onnx_client, config):
            self.client = onnx_client
            CONSTRUCTED.append(self)

        def handle_batch(self, payload):
            y = self.client.predict(payload)[0]
            return {"worker": os.environ["CORTEX_REPLICA_ID"], "constructed": len(CONSTRUCTED), "y": y}
"""


def test_next_job_uses_a_warm_worker_with_its_model_loaded(cortex: Installation, tmp_path: Path) -> None:
    api = deployed(cortex, tmp_path, Generation("warm", COUNTING, "handler", "onnx", {"models": {"path": "models"}}))
    first = api.submit([1.5])
    api.ended(first)
    second = api.submit([2.5], config={"other": 1})
    api.ended(second)
    (one,), (two,) = ([line["result"] for line in api.results(job)] for job in (first, second))
    assert (one["y"], two["y"]) == ([3.5], [4.5])
    assert one["worker"] == two["worker"]
    assert (one["constructed"], two["constructed"]) == (1, 1)  # module globals of its own for each job
    cortex.cortex("delete", "warm", "-f")
    wait_until(lambda: not cortex.pids("warm"))
