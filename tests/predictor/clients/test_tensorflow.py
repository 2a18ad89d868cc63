"""The client on a backend that computes with numpy: which signature is run, what goes in, what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cortex.errors import ModelError, ModelFormatError
from cortex.models.formats.tensorflow_model import JSON_TYPES, choose_signature
from cortex.models.loader import LoadRequest
from cortex.models.spec import DEFAULT_MODEL
from cortex.payloads.arrays import Array
from cortex.payloads.inference_tensors import datatype_of
from cortex.payloads.signature import TensorSignature
from cortex.predictor.clients.tensorflow import (
    SignatureInfo,
    TensorFlowClient,
    TensorFlowLoader,
    TensorFlowModel,
    clean_message,
)
from cortex.predictor.clients.tensorflow_backend import LOCAL, choose_backend, is_external
from cortex.predictor.clients.tensors import DTYPES, TensorSpec

FLOATS = TensorSpec(1, (None,), "x:0")
MIXED = SignatureInfo(
    {"x": FLOATS, "text": TensorSpec(7, (), "text:0")},
    {"y": TensorSpec(9, (None, 2), "y:0"), "any": TensorSpec(1, None, "any:0")},
    "tensorflow/serving/predict",
)
SINGLE = SignatureInfo({"x": FLOATS}, {"y": FLOATS})


class Recorder:
    """A servable that keeps what it was given."""

    def __init__(self, signatures: Mapping[str, SignatureInfo], refuses_zeros: bool = False) -> None:
        self.signatures = signatures
        self.runs: list[tuple[str, dict[str, Any]]] = []
        self._refuses_zeros = refuses_zeros

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.runs.append((signature_key, {name: array.tolist() for name, array in inputs.items()}))
        if self._refuses_zeros and not inputs["x"].any():
            raise ModelError("no zeros, please")
        return {"y": np.array([[1, 2]], np.int64)}


class InMemory:
    """A backend and a registry of one model."""

    def __init__(self, servable: Recorder, request: LoadRequest) -> None:
        self.unloaded: list[Recorder] = []
        self._servable = servable
        self.loader = TensorFlowLoader(self)
        self.model: TensorFlowModel[Recorder] = self.loader.load(request)

    def load(self, request: LoadRequest) -> Recorder:
        return self._servable

    def unload(self, servable: Recorder) -> None:
        self.unloaded.append(servable)

    def close(self) -> None: ...

    def get(self, name: str | None = None, version: str = "latest") -> TensorFlowModel[Recorder]:
        return self.model

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        return {"iris": {"versions": ["3", "10"], "timestamps": [30, 100]}}


def request(key: str | None = None, model: str = "iris") -> LoadRequest:
    return LoadRequest(model, "3", "/models/iris/3", "digest", 1, key)


def client(signature: SignatureInfo = MIXED, model: str = "iris") -> tuple[TensorFlowClient, Recorder]:
    servable = Recorder({"serving_default": signature})
    models = InMemory(servable, request(model=model))
    servable.runs.clear()
    return TensorFlowClient(models, models.loader.loaded), servable


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        ({"v": TensorSpec(21, ())}, {"y": FLOATS}, "has the input 'v' of the type DT_21, which APIs without code"),
        ({"x": FLOATS, "c": TensorSpec(8, ())}, {"y": FLOATS}, "has the input 'c' of the type DT_COMPLEX64,"),
        ({"x": FLOATS}, {"v": TensorSpec(21, ())}, "has the output 'v' of the type DT_21,"),
        ({"x": FLOATS}, {"y": FLOATS, "v": TensorSpec(21, ())}, ""),
    ],
)
def test_a_model_that_requests_without_code_can_not_run_is_refused(
    inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec], words: str
) -> None:
    servable = SimpleNamespace(signatures={"a": SignatureInfo(inputs, outputs)})
    model = TensorFlowModel(LoadRequest("m", "1", "/models/m", "", 0, None), cast("Any", servable))
    if not words:
        model.check_types()
        return
    with pytest.raises(ModelFormatError) as caught:
        model.check_types()
    assert words in str(caught.value) and "tensorflow_client" in str(caught.value)


def test_types_that_have_a_json_form_are_those_of_the_open_inference_protocol() -> None:
    assert {number for number, each in DTYPES.items() if datatype_of(each.numpy)} == JSON_TYPES


def test_an_input_of_any_rank_takes_any_shape() -> None:
    servable = SimpleNamespace(signatures={"a": SignatureInfo({"x": TensorSpec(1, None)}, {"y": FLOATS})})
    model = TensorFlowModel(LoadRequest("m", "1", "/models/m", "", 0, None), cast("Any", servable))
    assert model.signature.inputs == (TensorSignature("x", "FP32", (-1,), any_shape=True),)


@pytest.mark.parametrize(
    ("keys", "configured", "chosen"),
    [
        (["a"], None, "a"),
        (["a", "__saved_model_init_op", "__saved_model_train_op"], None, "a"),
        (["a", "b"], "b", "b"),
        (["a", "__saved_model_init_op"], "__saved_model_init_op", "__saved_model_init_op"),
        (["a", "predict", "serving_default"], None, "predict"),
        (["a", "serving_default"], None, "serving_default"),
        (["a", "predict"], "a", "a"),
    ],
)
def test_a_signature_is_chosen(keys: list[str], configured: str | None, chosen: str) -> None:
    assert choose_signature(dict.fromkeys(keys), configured, "model 'm'") == chosen


@pytest.mark.parametrize(
    ("keys", "configured", "message"),
    [
        (["b", "a"], "c", "signature_key 'c' is not a signature of model 'm'; available: 'a', 'b'"),
        (["b", "a"], None, "model 'm' has several signatures: 'a', 'b'; choose one with signature_key"),
        (["__saved_model_init_op"], None, "model 'm' has no signature"),
        ([], "c", "available: none"),
    ],
)
def test_an_ambiguous_choice_names_the_signatures(keys: list[str], configured: str | None, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        choose_signature(dict.fromkeys(keys), configured, "model 'm'")
    assert message in str(caught.value)


def test_inputs_are_converted_and_outputs_flattened() -> None:
    tensorflow_client, servable = client()
    assert tensorflow_client.predict({"x": 1, "text": "a"}) == {"y": ["1", "2"]}
    assert servable.runs == [("serving_default", {"x": [1.0], "text": b"a"})]


def test_a_model_with_one_input_takes_the_value_alone() -> None:
    tensorflow_client, servable = client(SINGLE)
    tensorflow_client.predict([1, 2])
    assert servable.runs == [("serving_default", {"x": [1.0, 2.0]})]


@pytest.mark.parametrize(
    ("model_input", "message"),
    [
        (
            {"x": 1},
            "missing key 'text' for model 'iris' of version 3; "
            "expected: 'x' (DT_FLOAT of shape [None]), 'text' (DT_STRING of shape [])",
        ),
        ({"x": 1, "text": "", "y": 2}, "unknown key 'y' for model 'iris' of version 3; expected: 'x' ("),
        ([1], "input for model 'iris' of version 3 is a list, not a dictionary; expected: 'x' ("),
        (
            {"x": [[1], [2, 3]], "text": ""},
            "input 'x' of model 'iris' of version 3 must be DT_FLOAT of shape [None], but the value is ragged: "
            "[0] has 1 values, but [1] has 2 values",
        ),
    ],
)
def test_rejects_invalid_input_before_it_calls_the_backend(model_input: Any, message: str) -> None:
    tensorflow_client, servable = client()
    with pytest.raises(ModelError) as caught:
        tensorflow_client.predict(model_input)
    assert message in str(caught.value)
    assert not servable.runs


def test_the_model_of_path_is_not_called_by_our_name_for_it() -> None:
    tensorflow_client, _ = client(model=DEFAULT_MODEL)
    with pytest.raises(ModelError, match="missing key 'text' for the model of version 3"):
        tensorflow_client.predict({"x": 1})


def test_a_model_is_run_on_zeros_when_it_is_loaded() -> None:
    servable = Recorder({"serving_default": MIXED})
    InMemory(servable, request())
    assert servable.runs == [("serving_default", {"x": [0.0], "text": b""})]


def test_a_model_may_refuse_zeros() -> None:
    models = InMemory(Recorder({"serving_default": SINGLE}, refuses_zeros=True), request())
    assert TensorFlowClient(models, models.loader.loaded).predict({"x": 1}) == {"y": ["1", "2"]}


def test_unloads_a_model_without_the_configured_signature() -> None:
    servable = Recorder({"a": SINGLE, "b": SINGLE})
    models = InMemory(servable, request("a"))
    with pytest.raises(ModelError, match="several signatures"):
        models.loader.load(request())
    assert models.unloaded == [servable]
    assert models.loader.loaded() == [models.model]


def test_describes_loaded_models() -> None:
    tensorflow_client, _ = client()
    metadata = tensorflow_client.describe()
    assert metadata.keys() == {"iris-3"}
    described = metadata["iris-3"]
    assert {key: described[key] for key in ("disk_path", "signature_key", "timestamp", "input_signatures")} == {
        "disk_path": "/models/iris/3",
        "signature_key": "serving_default",
        "timestamp": 30,
        "input_signatures": {"x": {"shape": [-1], "type": "float32"}, "text": {"shape": [], "type": "string"}},
    }
    assert described["signature_def"]["serving_default"] == {
        "inputs": {
            "x": {"name": "x:0", "dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": "-1"}]}},
            "text": {"name": "text:0", "dtype": "DT_STRING", "tensorShape": {}},
        },
        "outputs": {
            "y": {"name": "y:0", "dtype": "DT_INT64", "tensorShape": {"dim": [{"size": "-1"}, {"size": "2"}]}},
            "any": {"name": "any:0", "dtype": "DT_FLOAT", "tensorShape": {"unknownRank": True}},
        },
        "methodName": "tensorflow/serving/predict",
    }


def test_without_a_backend_the_error_names_both_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    both = "add tensorflow-cpu .* to requirements.txt, or put tensorflow_model_server on PATH"
    with pytest.raises(ModelError, match=both):
        choose_backend(None)


def test_an_address_is_an_external_server() -> None:
    assert [is_external(value) for value in (None, LOCAL, "serving:8500")] == [False, False, True]


def test_messages_of_tensorflow_are_shown_without_its_graph() -> None:
    said = "Graph execution error:\n\nDetected at node a\n<stack traces unavailable>\nno: [x]\n\t [[{{node a}}]] [Op:f]"
    assert clean_message(said) == "no: [x]"
