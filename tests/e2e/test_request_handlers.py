"""Deployments of 0.8 to 0.11 whose models have request handlers: deployed as they were written, and called."""

from __future__ import annotations

import pytest
import yaml

from harness.installations.installation import Installation
from harness.models.model_makers import onnx_model
from harness.wait import wait_until

HANDLER = """
import numpy as np


def pre_inference(sample, signature, metadata):
    return {signature[0].name: np.array(sample["values"])}


def post_inference(prediction, signature, metadata):
    return f"{metadata['label']}: {prediction[0].tolist()}"
"""
OLDER_HANDLER = """
def post_inference(prediction, metadata):
    return {metadata[0].name: prediction[0]}
"""


@pytest.fixture(scope="module")
def apis(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Deploy a model with a handler of each generation, and one without."""
    project = tmp_path_factory.mktemp("project")
    (project / "handler.py").write_text(HANDLER)
    (project / "older.py").write_text(OLDER_HANDLER)
    for name, data in onnx_model(10).items():
        (project / name).write_bytes(data)
    onnx = {"model": "model.onnx", "request_handler": "handler.py", "metadata": {"label": "sum"}}
    resources = [
        {"kind": "deployment", "name": "add"},
        {"kind": "api", "name": "newer", "onnx": onnx},
        {"kind": "api", "name": "older", "model": "model.onnx", "request_handler": "older.py"},
        {"kind": "api", "name": "plain", "onnx": {"model": "model.onnx"}},
    ]
    (project / "cortex.yaml").write_text(yaml.safe_dump(resources))
    cortex.cortex("deploy", project, timeout_s=100)
    return cortex


def test_each_generation_answers_as_it_did(apis: Installation) -> None:
    assert apis.post("/add/newer", {"values": [1, 2.5]}).json == "sum: [11.0, 12.5]"
    assert apis.post("/add/older", [1]).json == {"y": [11]}
    for sample in ([1, 2], {"x": [1, 2]}):
        assert apis.post("/add/plain", sample).json == [[11, 12]]


def test_errors_name_the_input_or_the_function(apis: Installation) -> None:
    reply = apis.post("/add/plain", {"y": [1]})
    assert (reply.status, reply.json["error"]) == (
        400,
        "missing key 'x' for the model of version 1; expected: 'x' (float32 of shape [?])",
    )
    reply = apis.post("/add/newer", {})
    assert reply.status == 500
    assert "KeyError in pre_inference()" in reply.json["error"]
    wait_until(lambda: "KeyError: 'values'" in log_of(apis, "newer"), message="the log has the exception")
    assert "in pre_inference" in log_of(apis, "newer")


def test_the_signature_has_a_path_of_its_own(apis: Installation) -> None:
    inputs = {"x": {"shape": ["n"], "type": "float32"}}
    assert apis.post("/add/older", method="GET").json["model_signature"] == inputs
    assert apis.post("/add/older/signature", method="GET").json == {"signature": inputs}
    assert apis.post("/add/older/other", method="GET").status == 404


def test_debug_logs_each_step(apis: Installation) -> None:
    apis.post("/add/newer?debug=true", {"values": [7]})
    steps = ["sample: {'values': [7]}", "pre_inference: {'x': array([7])}", "inference: [array([17.]", "'sum: [17.0]'"]
    wait_until(lambda: all(step in log_of(apis, "newer") for step in steps), message="the log has each step")


def log_of(cortex: Installation, api: str) -> str:
    return "".join(file.read_text() for file in (cortex.home / "logs" / api).glob("*.log"))
