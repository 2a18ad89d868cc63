"""The user's code with models, loaded as a replica does: what constructors get, and what is said if it goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cortex.errors import ModelError, UserError
from cortex.models.spec import DEFAULT_MODEL, Catalogue, Version
from cortex.predictor.clients import builder
from harness.models.catalogues import source_of, write_models
from harness.models.model_makers import onnx_model, python_model, tensorflow_model
from harness.models.user_project import UserProject, user_project

PREDICTOR = """
    import json
    from pathlib import Path

    class PythonPredictor:
        loads = []

        def __init__(self, config, python_client):
            self.client = python_client

        def load_model(self, model_path):
            self.loads.append(model_path)
            return json.loads((Path(model_path) / "first.json").read_text())

        def predict(self, payload):
            return self.client.get_model(**payload)["number"]
"""
ONNX = """
    class ONNXPredictor:
        def __init__(self, onnx_client, config, job_spec):
            assert job_spec is None
            self.client = onnx_client

        def predict(self, payload, query_params):
            return self.client.predict(payload, **query_params)[0].tolist()
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[UserProject]:
    root = tmp_path / "project"
    root.mkdir()
    with user_project(root) as project:
        yield project


@pytest.fixture
def two(tmp_path: Path) -> Catalogue:
    return write_models(
        tmp_path / "content",
        {"a": {"9": python_model(9), "10": python_model(10)}, "b": {"1": python_model(1)}},
    )


@pytest.fixture
def one(tmp_path: Path) -> Catalogue:
    return write_models(tmp_path / "content", {DEFAULT_MODEL: {"9": python_model(9), "10": python_model(10)}})


def call(bound: Any, payload: Any = None, query_params: Any = None) -> Any:
    return bound.methods["POST"].call(payload, query_params, None)


class Log:
    """Remembers events."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def loading(self, model: str, version: Version) -> None:
        self.lines.append(f"loading {model} {version.number}")

    def requested(self, model: str, version: Version) -> None:
        pass

    def loaded(self, versions: Any) -> None:
        self.lines.append("loaded " + ", ".join(f"{model} {version.number}" for model, version in versions))

    def failed(self, model: str, version: Version, message: str, detail: str) -> None:
        self.lines.append(f"failed {model} {version.number}: {message}")


def test_get_model_returns_what_load_model_returned(project, one):
    bound = project.load("predictor", PREDICTOR, models=source_of("python"), catalogue=one)
    assert call(bound, {}) == 10
    assert call(bound, {"model_version": "9"}) == 9
    assert call(bound, {"model_name": "any", "model_version": "latest"}) == 10


def test_a_version_is_loaded_once_from_a_folder_of_its_own(project, two):
    bound = project.load("predictor", PREDICTOR, models=source_of("python", "a", "b"), catalogue=two)
    for _ in range(3):
        assert [call(bound, {"model_name": name}) for name in ("a", "b")] == [10, 1]
        assert call(bound, {"model_name": "a", "model_version": "9"}) == 9
    import predictor

    loads = [Path(path) for path in predictor.PythonPredictor.loads]
    assert [(path.parent.name, path.name) for path in loads] == [("a", "10"), ("b", "1"), ("a", "9")]


def test_what_the_process_before_had_loaded_is_loaded_too(project, two):
    log = Log()
    source = source_of("python", "a", "b")
    project.load(
        "predictor", PREDICTOR, models=source, catalogue=two, events=log, extra_versions=[("a", "9"), ("gone", "1")]
    )
    assert [line for line in log.lines if line.startswith("loading")] == ["loading a 10", "loading b 1", "loading a 9"]
    assert log.lines[-1] == "loaded a 10, b 1, a 9"


def test_a_handler_gets_a_model_client(project, one):
    text = PREDICTOR.replace("PythonPredictor", "Handler").replace("python_client", "model_client")
    bound = project.load(
        "handler", text.replace("def predict", "def handle_post"), models=source_of("python"), catalogue=one
    )
    assert call(bound, {}) == 10


def test_models_can_be_had_in_the_constructor(project, one):
    text = PREDICTOR.replace(
        "self.client = python_client", "self.client = python_client; self.at_start = python_client.get_model('x', '9')"
    ).replace('return self.client.get_model(**payload)["number"]', 'return self.at_start["number"]')
    bound = project.load("predictor", text, models=source_of("python"), catalogue=one)
    assert call(bound) == 9


def test_a_class_may_have_its_own_new(project, one):
    text = PREDICTOR.replace(
        "        def load_model",
        """\
        def __new__(cls, config, python_client):
            self = super().__new__(cls)
            self.made = True
            return self

        def load_model""",
    )
    bound = project.load("predictor", text, models=source_of("python"), catalogue=one)
    assert call(bound, {}) == 10


def test_a_get_is_told_versions_and_timestamps(project, two):
    bound = project.load("predictor", PREDICTOR, models=source_of("python", "a", "b"), catalogue=two)
    assert bound.describe()["model_metadata"] == {
        "a": {"versions": ["9", "10"], "timestamps": [1600000009, 1600000010]},
        "b": {"versions": ["1"], "timestamps": [1600000001]},
    }


def test_without_models_nothing_is_said_of_them(project):
    bound = project.load(
        "predictor", "class PythonPredictor:\n def __init__(self, config): ...\n def predict(self): return 1"
    )
    assert "model_metadata" not in bound.describe()
    assert bound.registry is None
    bound.close()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "model_name was not specified, choose one of the following: ['a', 'b']"),
        ({"model_name": "x"}, "'x' model wasn't found in the list of available models: ['a', 'b']"),
        (
            {"model_name": "a", "model_version": "8"},
            "model a of version 8 wasn't found; available versions: ['9', '10']",
        ),
        ({"model_name": "a", "model_version": 9}, "model_version must be str"),
        ({"model_name": "a", "model_version": "x"}, "either a parse-able numeric value or 'latest'"),
    ],
)
def test_what_there_is_not_is_an_error_that_names_what_there_is(project, two, payload, message):
    bound = project.load("predictor", PREDICTOR, models=source_of("python", "a", "b"), catalogue=two)
    with pytest.raises(ModelError) as raised:
        call(bound, payload)
    assert message in str(raised.value)


BROKEN = PREDICTOR.replace(
    "self.loads.append(model_path)",
    "if model_path.endswith('/10'): raise ValueError('bad weights')",
)


def test_a_latest_version_that_does_not_load_ends_the_start_with_the_users_frames(project, one):
    with pytest.raises(UserError) as raised:
        project.load("predictor", BROKEN, models=source_of("python"), catalogue=one)
    error = raised.value
    assert str(error).endswith("of version 10: ValueError: bad weights")
    assert str(error).startswith("failed (re-)loading model s3://bucket/")
    assert 'File "predictor.py"' in error.traceback
    assert "load_model" in error.traceback
    assert "cortex/predictor" not in error.traceback
    assert "cortex/models" not in error.traceback


def test_an_error_in_the_constructor_shows_the_users_call(project, two):
    text = PREDICTOR.replace("self.client = python_client", "python_client.get_model('x')")
    with pytest.raises(ModelError) as raised:
        project.load("predictor", text, models=source_of("python", "a", "b"), catalogue=two)
    assert "'x' model wasn't found" in str(raised.value)
    assert 'File "predictor.py", line 9, in __init__' in raised.value.traceback
    assert "cortex/predictor" not in raised.value.traceback


def test_load_model_can_t_be_async(project, one):
    text = PREDICTOR.replace("def load_model", "async def load_model")
    with pytest.raises(UserError, match=r"load_model\(\) must be a plain function, not `async def`"):
        project.load("predictor", text, models=source_of("python"), catalogue=one)


@pytest.mark.parametrize(
    ("interface", "text", "message"),
    [
        ("predictor", PREDICTOR.replace("load_model", "load"), "load_model(self, model_path) is not defined; add it"),
        ("predictor", PREDICTOR.replace(", python_client", ""), '"python_client" is a required argument'),
        ("predictor", ONNX, "class ONNXPredictor belongs to `type: onnx`"),
    ],
)
def test_python_code_with_models_needs_both_client_and_load_model(project, one, interface, text, message):
    with pytest.raises(UserError) as raised:
        project.load(interface, text, models=source_of("python"), catalogue=one)
    assert message in str(raised.value)


def test_with_caching_models_are_loaded_when_asked_for_and_within_the_limit(project, two):
    log = Log()
    source = source_of("python", "a", "b", cache_size=1)
    bound = project.load("predictor", PREDICTOR, models=source, catalogue=two, events=log)
    assert log.lines == []
    assert [call(bound, {"model_name": name}) for name in "abba"] == [10, 1, 1, 10]
    assert [line for line in log.lines if line.startswith("loading")] == ["loading a 10", "loading b 1", "loading a 10"]
    assert max(line.count(",") for line in log.lines) == 0


def test_with_caching_what_an_async_call_got_stays_until_its_end(project, two):
    text = PREDICTOR.replace("def predict(self, payload):", "async def predict(self, payload):").replace(
        "return self.client.get_model(**payload)",
        "m = self.client.get_model(**payload); import asyncio; await asyncio.sleep(0); return m",
    )
    source = source_of("python", "a", "b", cache_size=1)
    bound = project.load("predictor", text, models=source, catalogue=two)
    assert bound.methods["POST"].kind == "async"
    assert asyncio.run(call(bound, {"model_name": "a"})) == 10
    assert asyncio.run(call(bound, {"model_name": "b"})) == 1


def test_an_onnx_predictor_runs_its_models(project, tmp_path):
    models: Mapping[str, Any] = {"a": {"1": onnx_model(1), "2": onnx_model(2)}, "b": {"5": onnx_model(5)}}
    catalogue = write_models(tmp_path / "content", models)
    bound = project.load("predictor", ONNX, type="onnx", models=source_of("onnx", "a", "b"), catalogue=catalogue)
    assert call(bound, 1.5, {"model_name": "a"}) == [3.5]
    assert call(bound, {"x": [1, 2]}, {"model_name": "a", "model_version": "1"}) == [2, 3]
    assert bound.describe()["model_metadata"]["b"] == {
        "versions": ["5"],
        "timestamps": [1600000005],
        "input_signatures": {"x": {"shape": ["n"], "type": "float32"}},
    }
    assert bound.registry is not None
    bound.registry.update(Catalogue(catalogue.models[:1]))
    with pytest.raises(ModelError, match="'b' model's versions have been removed"):
        call(bound, 1, {"model_name": "b"})
    bound.close()


def test_a_handler_may_run_onnx_models_too(project, tmp_path):
    catalogue = write_models(tmp_path / "content", {DEFAULT_MODEL: {"1": onnx_model(1)}})
    text = ONNX.replace("ONNXPredictor", "Handler").replace("def predict", "def handle_put").replace(", job_spec", "")
    text = text.replace("            assert job_spec is None\n", "")
    bound = project.load("handler", text, type="onnx", models=source_of("onnx"), catalogue=catalogue)
    assert bound.methods["PUT"].call([1, 2], {}, None) == [2, 3]


@pytest.mark.heavy
def test_a_tensorflow_predictor_runs_its_models(project, tmp_path):
    pytest.importorskip("tensorflow")
    catalogue = write_models(tmp_path / "content", {"a": {"1": tensorflow_model(1), "2": tensorflow_model(2)}})
    text = ONNX.replace("ONNXPredictor", "TensorFlowPredictor").replace("onnx_client", "tensorflow_client")
    bound = project.load(
        "predictor",
        text.replace("[0].tolist()", '["y"]'),
        type="tensorflow",
        models=source_of("tensorflow", "a"),
        catalogue=catalogue,
    )
    assert call(bound, {"x": 1.5}, {"model_name": "a"}) == [3.5]
    assert call(bound, {"x": [1, 2]}, {"model_name": "a", "model_version": "1"}) == [2, 3]
    metadata = bound.describe()["model_metadata"]
    assert set(metadata) == {"a-1", "a-2"}
    assert metadata["a-2"]["signature_key"] == "serving_default"
    assert metadata["a-2"]["timestamp"] == 1600000002
    bound.close()


@pytest.mark.parametrize(
    ("type_", "text", "module", "package"),
    [
        ("onnx", ONNX, "onnxruntime", "onnxruntime"),
        ("tensorflow", ONNX.replace("ONNX", "TensorFlow").replace("onnx_", "tensorflow_"), "numpy", "tensorflow-cpu"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_what_to_do(project, monkeypatch, type_, text, module, package):
    def missing(*arguments: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(builder, "_BUILDERS", {type_: missing})
    with pytest.raises(UserError) as raised:
        project.load("predictor", text, type=type_, models=source_of(type_), catalogue=Catalogue(()))
    assert str(raised.value).startswith(f"type: {type_} needs {module}, which is not installed; add {package} to")
