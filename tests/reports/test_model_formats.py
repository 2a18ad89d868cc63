"""Reports about models without code: files that do more than they should, when they are served and when they arrive."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.installations.installation import Installation, write_project
from harness.models.model_makers import onnx_model, tensorflow_model
from harness.wait import PATIENCE_S, wait_until
from models.formats.test_detection import message, onnx
from models.formats.test_tensorflow_model import graph, node

CONFIG = """
    - name: t
      kind: RealtimeAPI
      handler: {type: model, models: {path: FOLDER, poll_interval: 1s}}
"""

#: A second graph, which parsers add to the first one.
WITH_A_SECOND_GRAPH = {"saved_model.pb": message((2, message((2, graph(node("a", "ReadFile"))))))}
HOSTILE = [
    pytest.param({"model.onnx": onnx_model(2)["model.onnx"] + onnx("/etc/passwd")}, "outside of its folder", id="onnx"),
    pytest.param(
        {name: data + WITH_A_SECOND_GRAPH.get(name, b"") for name, data in tensorflow_model(2).items()},
        "operations that may reach files, the network or other code: ReadFile",
        id="tensorflow",
    ),
]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("files", "words"), HOSTILE)
def test_a_hostile_model_is_refused_when_it_is_served_and_when_it_arrives(
    cortex: Installation, tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    refused = cortex.cortex("serve", write(tmp_path / "hostile", files), check=False)
    assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    models = write(tmp_path / "models" / "1", dict(onnx_model(1))).parent
    try:
        cortex.cortex("deploy", write_project(tmp_path / "project", "", CONFIG.replace("FOLDER", str(models))))
        write(tmp_path / "2", files).rename(models / "2")
        wait_until(lambda: words in cortex.cortex("get", "t").stdout, PATIENCE_S, "the problem is shown")
        assert cortex.post("/t", [10]).json == [11]
    finally:
        cortex.clear()


@pytest.mark.parametrize("auth", ["none", "api_key"])
def test_a_deploy_prints_a_request_for_a_model_and_sends_none(cortex: Installation, tmp_path: Path, auth: str) -> None:
    models = write(tmp_path / "models" / "1", dict(onnx_model(1))).parent
    config = CONFIG.replace("FOLDER", str(models)) + f"      networking: {{auth: {auth}}}\n"
    try:
        done = cortex.cortex("deploy", write_project(tmp_path / "project", "", config))
        assert '{"instances": [0]}' in done.stdout
        assert ("X-API-Key" in done.stdout) == (auth == "api_key")
        assert set(cortex.get("t")["metrics"]["requests"].values()) == {0}
    finally:
        cortex.clear()
