"""APIs without code: the built-in class around ONNX and TensorFlow models, loaded as in a replica."""

from __future__ import annotations

import cProfile
import pickle
import pstats
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from starlette.exceptions import HTTPException

from cortex.errors import ModelError, UserError
from cortex.models.formats import requirements
from cortex.models.spec import DEFAULT_MODEL, Catalogue, ModelPath, ModelSource
from cortex.payloads.inference_protocol import V2Error
from cortex.predictor.batch import load_batch_code
from cortex.predictor.loader import BoundPredictor
from harness.models.catalogues import Files, source_of, write_models
from harness.models.model_makers import onnx_model, tensorflow_model
from harness.models.user_project import Spec, UserProject

MAKERS = {"onnx": onnx_model, "tensorflow": tensorflow_model}
#: TensorFlow takes seconds to import.
TYPES = ["onnx", pytest.param("tensorflow", marks=pytest.mark.heavy)]


def load(
    project: UserProject,
    type_: str,
    models: Mapping[str, Mapping[str, Files]],
    cache_size: int | None = None,
    **fields: Any,
) -> BoundPredictor:
    catalogue = write_models(project.root.parent / "models", models)
    names = () if DEFAULT_MODEL in models else tuple(models)
    source = source_of(type_, *names, cache_size=cache_size)
    return project.load("handler", None, "", type=type_, models=source, catalogue=catalogue, **fields)


def post(bound: BoundPredictor, payload: Any, query: dict[str, str] | None = None, **headers: str) -> Any:
    return plain(bound.methods["POST"].call(payload, query or {}, headers))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("type_", TYPES)
def test_each_form_is_answered_in_kind(project: UserProject, type_: str) -> None:
    bound = load(project, type_, {DEFAULT_MODEL: {"1": MAKERS[type_](10)}})
    assert post(bound, [1, 2]) == [11, 12]
    assert post(bound, {"x": [1, 2]}) == {"y": [11, 12]}
    assert post(bound, {"instances": [1, 2]}) == {"predictions": [11, 12]}
    assert post(bound, {"instances": [{"x": 1}, {"x": 2}]}) == {"predictions": [11, 12]}
    assert post(bound, {"inputs": [1, 2]}) == {"outputs": [11, 12]}
    assert post(bound, {"inputs": {"x": [1, 2]}}) == {"outputs": [11, 12]}
    assert post(bound, b'{"instances": [1]}') == {"predictions": [11]}
    bound.close()


@pytest.mark.parametrize("type_", TYPES)
def test_a_get_says_what_was_found_and_the_signature_has_it(project: UserProject, type_: str) -> None:
    bound = load(project, type_, {DEFAULT_MODEL: {"7": MAKERS[type_](10)}})
    (described,) = bound.describe()["models"]
    platform, why = {
        "onnx": ("onnxruntime_onnx", "model.onnx is an ONNX model"),
        "tensorflow": ("tensorflow_savedmodel", "is a SavedModel"),
    }[type_]
    tensor = {"datatype": "FP32", "shape": [-1]}
    assert why in described.pop("found")
    assert described == {
        "name": "iris",
        "versions": ["7"],
        "platform": platform,
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
    }
    (model,) = bound.signature.models
    assert (model.name, model.platform, [each.name for each in model.inputs]) == ("iris", platform, ["x"])
    bound.close()


def test_a_version_and_a_model_can_be_chosen(project: UserProject) -> None:
    bound = load(project, "onnx", {"a": {"9": onnx_model(9), "10": onnx_model(10)}, "b": {"1": onnx_model(1)}})
    assert post(bound, [0], {"model": "a"}) == [10]
    assert post(bound, [0], {"model": "a", "version": "9"}) == [9]
    assert post(bound, [0], {"model": "a", "version": "latest"}) == [10]
    assert post(bound, [0], **{"x-model-name": "a", "x-model-version": "9"}) == [9]
    for sent in "größe".encode().decode("latin-1"), "größe":  # the bytes of UTF-8, and of Latin-1
        with pytest.raises(HTTPException) as caught:
            post(bound, [0], **{"x-model-name": sent})
        assert caught.value.detail == "there is no model 'größe'; this API has a, b"
    assert post(bound, [0], {"model": "b"}) == [1]
    for query, message in (
        ({}, "this API has several models: choose one with ?model=, of a, b"),
        ({"model": "c"}, "there is no model 'c'; this API has a, b"),
        ({"model": "a", "version": "8"}, "a has no version 8; it has 9, 10"),
        ({"model": "a", "version": "x"}, "a has no version x"),
    ):
        with pytest.raises(HTTPException) as raised:
            post(bound, [0], query)
        assert (raised.value.status_code, message in raised.value.detail) == (404, True), raised.value.detail
    bound.close()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"instances": ["a"]}, "row 1 is 'a'; it must be a number"),
        ({"inputs": {"z": [1]}}, "inputs has no 'x' and has 'z', which the model lacks"),
        (b"a,b", "JSON"),
        (None, "the body is null; send rows"),
    ],
)
def test_invalid_requests_get_400(project: UserProject, payload: Any, message: str) -> None:
    bound = load(project, "onnx", {DEFAULT_MODEL: {"1": onnx_model(10)}})
    with pytest.raises(HTTPException) as raised:
        post(bound, payload)
    assert raised.value.status_code == 400
    assert message in raised.value.detail
    bound.close()


def test_a_request_costs_the_same_however_many_models_there_are(project: UserProject) -> None:
    requests, descriptions = [], []
    for count in (30, 300):
        models = {f"m{number}": {"1": onnx_model(10)} for number in range(count)}
        bound = load(project, "onnx", models, cache_size=1)
        requests.append(count_calls(partial(request_one, bound)))
        descriptions.append(count_calls(bound.describe) / count)
        bound.close()
    assert requests[1] <= 1.1 * requests[0], requests
    assert descriptions[1] <= 1.1 * descriptions[0], descriptions


def request_one(bound: BoundPredictor) -> None:
    assert post(bound, [1], {"model": "m1"}) == [11]
    served = bound.inference_models["m1"]
    assert served.signature().name == "m1"
    assert (served.versions(), len(bound.inference_models) > 1) == (("1",), True)


def count_calls(run: Callable[[], Any]) -> int:
    """Return the number of Python and C functions that a second call of `run` calls."""
    run()
    profile = cProfile.Profile(builtins=True)
    profile.runcall(run)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("iris.onnx", "onnxruntime is not installed; write into requirements.txt: onnxruntime>="),
        ("s3://bucket/iris.onnx", "type: model needs numpy, which is not installed; add numpy to requirements.txt"),
    ],
)
def test_without_numpy_the_error_has_the_lines_for_requirements(
    project: UserProject, monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    (file,) = onnx_model(10).values()
    (project.root / "iris.onnx").write_bytes(file)
    source = ModelSource("python", (ModelPath(DEFAULT_MODEL, url if "://" in url else str(project.root / url)),))
    monkeypatch.setattr(requirements, "installed_version", lambda package: None)
    monkeypatch.setitem(sys.modules, "numpy", None)
    for module in ("model_handler", "batching"):
        monkeypatch.delitem(sys.modules, f"cortex.predictor.inference.{module}", raising=False)
    with pytest.raises(UserError) as raised:
        project.load("handler", None, "", type="model", models=source, catalogue=Catalogue(()))
    assert message in str(raised.value)


def test_batched_requests_are_joined_and_fail_alone(project: UserProject) -> None:
    models = {"a": {"9": onnx_model(9), "10": onnx_model(10)}}
    bound = load(project, "onnx", models, max_batch_size=8)
    payloads = [[0], {"instances": [1, 2]}, ["text"], [3], [4]]
    queries = [{}, {}, {}, {"version": "9"}, {"version": "8"}]
    assert bound.methods["POST"].payload_type is None  # each request has a form of its own
    results = bound.methods["POST"].call(payloads, queries, [{}] * 5)
    assert [plain(each) for each in (results[0], results[1], results[3])] == [[10], {"predictions": [11, 12]}, [12]]
    assert [results[2].status_code, results[4].status_code] == [400, 404]
    bound.close()


def test_a_model_that_takes_one_row_is_called_for_each_request(project: UserProject) -> None:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    files = {"model.onnx": model.SerializeToString()}
    bound = load(project, "onnx", {DEFAULT_MODEL: {"1": files}}, max_batch_size=8)
    results = bound.methods["POST"].call([[[1, 2]], [[3, 4]]], [{}, {}], [{}, {}])
    assert [plain(each) for each in results] == [[[-1, -2]], [[-3, -4]]]
    bound.close()


def test_the_models_are_offered_to_the_inference_protocol(project: UserProject) -> None:
    models = {"a": {"9": onnx_model(9), "10": onnx_model(10)}, "b": {"1": onnx_model(1)}}
    bound = load(project, "onnx", models, cache_size=1)
    assert list(bound.inference_models) == ["a", "b"]
    assert bound.signature.models == ()  # they are loaded on demand
    model = bound.inference_models["a"]
    assert model.versions() == ("9", "10")
    assert plain(model.infer({"x": np.array([1], np.float32)}, None, ())) == {"y": [11]}
    assert plain(model.infer({"x": np.array([1], np.float32)}, "9", ("y",))) == {"y": [10]}
    assert (model.signature("9").name, model.signature().inputs[0].datatype) == ("a", "FP32")
    with pytest.raises(KeyError, match="version 8"):
        model.infer({}, "8", ())
    with pytest.raises(V2Error, match="missing key"):
        model.infer({}, None, ())
    bound.close()


@pytest.mark.heavy  # skl2onnx takes seconds to import
def test_a_classifier_gives_labels_and_probabilities(project: UserProject) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    rows, classes = load_iris(return_X_y=True)
    fitted = LogisticRegression(max_iter=500).fit(rows, classes)
    model = skl2onnx.to_onnx(fitted, rows[:1].astype(np.float32), target_opset=15)
    bound = load(project, "onnx", {DEFAULT_MODEL: {"1": {"model.onnx": model.SerializeToString()}}})
    label, probability = bound.signature.models[0].outputs
    assert (label.datatype, probability.shape, probability.labels) == ("INT64", (-1, 3), ("0", "1", "2"))
    (row, _) = post(bound, {"instances": rows[:2].tolist()})["predictions"]
    assert row["output_label"] == 0
    assert np.allclose(row["output_probability"], fitted.predict_proba(rows[:1])[0], atol=1e-5)
    bound.close()


@pytest.mark.parametrize("type_", TYPES)
def test_the_format_of_a_model_is_detected(project: UserProject, type_: str) -> None:
    bound = load(project, "model", {DEFAULT_MODEL: {"1": MAKERS[type_](10)}})
    assert post(bound, {"instances": [1]}) == {"predictions": [11]}
    assert bound.describe()["models"][0]["platform"].startswith(type_)
    bound.close()


@pytest.mark.heavy  # scikit-learn takes seconds to import
def test_pickles_need_trust(project: UserProject) -> None:
    from sklearn.linear_model import LinearRegression

    files = {"model.pkl": pickle.dumps(LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0]))}
    with pytest.raises(ModelError, match="write `trust: pickle` if you trust it"):
        load(project, "model", {DEFAULT_MODEL: {"1": files}})
    bound = load(project, "model", {DEFAULT_MODEL: {"1": files}}, trusts_pickle=True)
    (prediction,) = post(bound, {"instances": [[3.0]]})["predictions"]
    assert prediction == pytest.approx(6)
    bound.close()


def test_csv_and_records_are_taken(project: UserProject) -> None:
    bound = load(project, "onnx", {DEFAULT_MODEL: {"1": onnx_model(10)}})
    assert post(bound, b"x\n1\n2\n", **{"content-type": "text/csv"}) == [11, 12]
    assert post(bound, [{"x": 1}]) == [11]
    bound.close()


@pytest.mark.parametrize("kind", ["BatchAPI", "AsyncAPI"])
def test_jobs_and_workloads_need_no_code_either(project: UserProject, kind: str) -> None:
    catalogue = write_models(project.root.parent / "models", {DEFAULT_MODEL: {"1": onnx_model(10)}})
    spec = Spec(str(project.root), "handler", "", type="onnx", models=source_of("onnx"), kind=kind)
    code = load_batch_code(spec, catalogue)
    batch = code.construct({}, {}, {})
    assert plain(batch.call([1, 2], "id")) == [11, 12]
    code.close()
