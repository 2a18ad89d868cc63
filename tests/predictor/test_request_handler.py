"""Request handlers of 0.8 to 0.11 around ONNX and TensorFlow models, loaded as in a replica."""

from __future__ import annotations

import io
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from cortex.errors import ModelError, UserError
from cortex.models.spec import DEFAULT_MODEL
from cortex.predictor.interface import GENERATIONS
from cortex.predictor.loader import BoundPredictor
from harness.models.catalogues import Files, source_of, write_models
from harness.models.model_makers import onnx_model, tensorflow_model
from harness.models.user_project import UserProject

USES_TENSORFLOW = pytest.mark.heavy  # it takes seconds to import
TENSORFLOW_SIGNATURE = {
    "inputs": {"x": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": "-1"}]}}},
    "outputs": {"y": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": "-1"}]}}},
}
SHOWS_ARGUMENTS = """
    def pre_inference(sample, signature, metadata):
        metadata["first"] = (sample, signature)
        return {"x": [sample["value"]]}

    def post_inference(prediction, signature, metadata):
        return metadata["labels"], metadata["first"], (prediction, signature)
"""


def load(
    project: UserProject, type_: str, files: Files, text: str | None, interface: str = "request_handler", **config: Any
) -> BoundPredictor:
    catalogue = write_models(project.root.parent / "models", {DEFAULT_MODEL: {"1": files}})
    path = "handler.py" if text else ""
    source = source_of(type_)
    return project.load(interface, text, path, type=type_, models=source, catalogue=catalogue, config=config)


@pytest.fixture
def onnx(project: UserProject) -> Any:
    return partial(load, project, "onnx", onnx_model(10))


@pytest.fixture
def tensorflow(project: UserProject) -> Any:
    return partial(load, project, "tensorflow", tensorflow_model(10))


def predict(bound: BoundPredictor, sample: Any) -> Any:
    return bound.methods["POST"].call(sample, None, None)


def test_functions_around_an_onnx_model_get_its_inputs_and_its_outputs(onnx: Any) -> None:
    bound = onnx(SHOWS_ARGUMENTS, labels=["setosa"])
    labels, (sample, inputs), (prediction, outputs) = predict(bound, {"value": 2})
    assert (labels, sample, [array.tolist() for array in prediction]) == (["setosa"], {"value": 2}, [[12]])
    assert ([i.name for i in inputs], [o.name for o in outputs]) == (["x"], ["y"])
    bound.close()


@USES_TENSORFLOW
def test_functions_around_a_tensorflow_model_get_all_of_its_signatures(tensorflow: Any) -> None:
    bound = tensorflow(SHOWS_ARGUMENTS, labels=["setosa"])
    labels, first, (prediction, of_outputs) = predict(bound, {"value": 2})
    assert (labels, first[0], prediction) == (["setosa"], {"value": 2}, {"y": [12]})
    for signature in (first[1], of_outputs):
        shown = signature["serving_default"]
        for side, tensors in TENSORFLOW_SIGNATURE.items():
            for name, tensor in tensors.items():
                assert {key: shown[side][name][key] for key in tensor} == tensor
        assert shown["methodName"] == "tensorflow/serving/predict"
    bound.close()


@pytest.mark.parametrize("type_", ["onnx", pytest.param("tensorflow", marks=USES_TENSORFLOW)])
def test_the_metadata_of_0_8_and_0_9_is_the_signature(request: pytest.FixtureRequest, type_: str) -> None:
    text = """
        def pre_inference(sample, metadata):
            names = metadata["serving_default"]["inputs"] if isinstance(metadata, dict) else [metadata[0].name]
            return {list(names)[0]: sample}

        def post_inference(prediction, metadata):
            values = prediction["y"] if isinstance(prediction, dict) else prediction[0]
            return [float(value) for value in values]
    """
    bound = request.getfixturevalue(type_)(text, interface="older_request_handler")
    assert predict(bound, [1, 2.5]) == [11, 12.5]
    bound.close()


@USES_TENSORFLOW
def test_a_model_without_functions_gets_the_sample_and_answers_as_is(onnx: Any, tensorflow: Any) -> None:
    for load_model, expected in ((onnx, [[11, 12]]), (tensorflow, {"y": [11, 12]})):
        bound = load_model(None)
        for sample in ({"x": [1, 2]}, [1, 2]):
            found = predict(bound, sample)
            assert (found if isinstance(found, dict) else [value.tolist() for value in found]) == expected
        bound.close()


@USES_TENSORFLOW
def test_a_zip_archive_may_hold_the_model(project: UserProject) -> None:
    files = io.BytesIO()
    with zipfile.ZipFile(files, "w") as archive:
        for version in (9, 10):
            for name, data in tensorflow_model(version).items():
                archive.writestr(f"{version}/{name}", data)
    bound = load(project, "tensorflow", {"1568244606.zip": files.getvalue()}, None)
    assert predict(bound, {"x": [1]}) == {"y": [11]}
    folder = Path(bound.clients.describe()["_cortex_default-1"]["disk_path"]) if bound.clients else Path()
    assert folder.is_dir()
    bound.close()
    assert not folder.exists()


@pytest.mark.parametrize("data", [b"PK no archive", b""])
def test_an_invalid_archive_is_an_error_of_the_model(project: UserProject, data: bytes) -> None:
    with pytest.raises(ModelError, match=r"model.zip can't be unpacked"):
        load(project, "tensorflow", {"model.zip": data}, None)


def test_each_function_may_be_missing(onnx: Any) -> None:
    bound = onnx("def post_inference(prediction, signature, metadata): return prediction[0].tolist()")
    assert predict(bound, [1]) == [11]
    bound.close()


def test_the_sample_is_none_if_the_request_has_no_json(onnx: Any) -> None:
    bound = onnx("def pre_inference(sample, signature, metadata): return [0 if sample is None else 1]")
    assert predict(bound, None)[0].tolist() == [10]
    assert bound.methods["POST"].bodies.name == "JSON_ONLY"
    bound.close()


@USES_TENSORFLOW
def test_a_sample_that_the_model_rejects_is_the_mistake_of_the_caller(onnx: Any, tensorflow: Any) -> None:
    cases = [
        (
            onnx,
            {"x": ["a"]},
            "input 'x' of the model of version 1 must be float32 of shape [?], but [0] is 'a', not a number",
        ),
        (onnx, None, "send JSON with the header `content-type: application/json`"),
        (
            tensorflow,
            {"z": [1]},
            "unknown key 'z' for the model of version 1; expected: 'x' (DT_FLOAT of shape [None])",
        ),
        (
            tensorflow,
            {"x": [[1]]},
            "input 'x' of the model of version 1 must be DT_FLOAT of shape [None], but the value has shape",
        ),
    ]
    for load_model, sample, message in cases:
        bound = load_model(None)
        with pytest.raises(HTTPException) as raised:
            predict(bound, sample)
        assert raised.value.status_code == 400
        assert message in str(raised.value.detail)
        bound.close()


def test_a_prepared_sample_that_the_model_rejects_is_the_mistake_of_the_function(onnx: Any) -> None:
    bound = onnx("def pre_inference(sample, signature, metadata): return {'x': 'text'}")
    with pytest.raises(ModelError, match="input 'x' of the model of version 1 must be float32"):
        predict(bound, {})
    bound.close()


def test_each_step_can_be_traced(onnx: Any) -> None:
    bound = onnx(SHOWS_ARGUMENTS, labels=["setosa"])
    steps: list[tuple[str, Any]] = []
    traced = bound.methods["POST"].traced
    assert traced is not None
    traced({"value": 1}, lambda name, value: steps.append((name, value)))
    assert [name for name, _ in steps] == ["pre_inference", "inference", "post_inference"]
    assert (steps[0][1], steps[2][1][0]) == ({"x": [1]}, ["setosa"])
    bound.close()


@USES_TENSORFLOW
def test_a_get_describes_the_inputs(onnx: Any, tensorflow: Any) -> None:
    message = "make a prediction by sending a post request to this endpoint with a json sample"
    for load_model, shape in ((onnx, ["n"]), (tensorflow, [-1])):
        bound = load_model(None)
        expected = {"message": message, "model_signature": {"x": {"shape": shape, "type": "float32"}}}
        assert bound.describe() == expected
        bound.close()


@pytest.mark.parametrize(
    ("interface", "text", "message"),
    [
        ("request_handler", "def pre_inference(sample, metadata): ...", '"signature" is a required argument'),
        (
            "request_handler",
            "def post_inference(prediction, metadata, signature): ...",
            "the arguments must be in the order prediction, signature, metadata",
        ),
        ("request_handler", "def pre_inference(*args): ...", '"*args" is not supported'),
        ("older_request_handler", "def pre_inference(sample, signature, metadata): ...", '"signature" is not a'),
    ],
)
def test_the_arguments_of_functions_are_exact(onnx: Any, interface: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match="invalid signature for function") as raised:
        onnx(text, interface=interface)
    assert message in str(raised.value)


def test_a_pickle_may_hold_the_functions(project: UserProject, onnx: Any) -> None:
    import dill

    functions = {"post_inference": lambda prediction, signature, metadata: prediction[0].tolist()}
    (project.root / "handler.pickle").write_bytes(dill.dumps(functions, recurse=True))
    catalogue = write_models(project.root.parent / "models", {DEFAULT_MODEL: {"1": onnx_model(10)}})
    bound = project.load(
        "request_handler", None, "handler.pickle", type="onnx", models=source_of("onnx"), catalogue=catalogue
    )
    assert predict(bound, [1]) == [11]
    bound.close()


def test_both_forms_are_rows_of_the_table() -> None:
    keys = {key for _, key, _, _ in GENERATIONS if key.endswith("request_handler")}
    assert keys == {"request_handler", "older_request_handler"}
