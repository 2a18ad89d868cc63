"""`cortex serve`: a model becomes an API with one command; what can't be served changes nothing."""

from __future__ import annotations

import pickle
import shlex
import subprocess
from pathlib import Path

import pytest

from harness.installations.installation import Installation
from harness.models.model_makers import onnx_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An ONNX model that adds 10."""
    file = tmp_path / "My Model.onnx"
    file.write_bytes(onnx_model(10)["model.onnx"])
    return file


def test_a_model_file_is_served_and_the_printed_request_works(cortex: Installation, model: Path) -> None:
    done = cortex.cortex("serve", model)
    assert "is an ONNX model" in done.stdout
    assert "my-model is live" in done.stdout
    assert "input: x FP32 [?]" in done.stdout
    curl = next(line.strip() for line in done.stdout.splitlines() if line.strip().startswith("curl"))
    answer = subprocess.run([*shlex.split(curl), "--silent"], capture_output=True, text=True, check=True)
    assert answer.stdout == '{"predictions":[10.0]}'
    assert cortex.post("/my-model", body=b"x\n1\n", content_type="text/csv").json == [11]
    refused = cortex.post("/my-model", {"instances": ["a"]})
    assert (refused.status, refused.json["error"]) == (400, "row 1 is 'a'; it must be a number")
    assert cortex.post("/my-model?version=7", [1]).status == 404
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    inferred = cortex.post("/my-model/v2/models/my-model/infer", {"inputs": [tensor]}).json
    assert inferred["outputs"][0]["data"] == [11]
    (described,) = cortex.post("/my-model", method="GET").json["models"]
    assert (described["platform"], described["versions"]) == ("onnxruntime_onnx", ["1"])


def test_mistakes_exit_with_2_and_deploy_nothing(cortex: Installation, model: Path, tmp_path: Path) -> None:
    text, pickled, other = tmp_path / "notes.txt", tmp_path / "iris.pkl", tmp_path / "other" / "My Model.onnx"
    text.write_text("hello")
    pickled.write_bytes(pickle.dumps(print))
    other.parent.mkdir()
    other.write_bytes(model.read_bytes())
    cortex.cortex("serve", model, "--name", "taken")
    before = [api["spec"]["name"] for api in cortex.client.list_apis()]
    for arguments, message in (
        ([tmp_path / "nothing.onnx"], "no such file or folder"),
        ([text], "is not a model that cortex knows"),
        ([pickled], "use --trust pickle if you trust its author"),
        ([model, "--type", "tensorflow"], "not of type tensorflow; remove --type"),
        ([model, "--name", "Not a name"], '"Not a name" must contain only lower case letters'),
        ([other, "--name", "taken"], "an API named taken exists already"),
        (["http://host/model.onnx"], "must be a path, or start with s3:// or gs://"),
    ):
        done = cortex.cortex("serve", *arguments, check=False)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert done.stderr.count("\n") == 1
    assert [api["spec"]["name"] for api in cortex.client.list_apis()] == before
