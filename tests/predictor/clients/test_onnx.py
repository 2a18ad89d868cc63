"""The ONNX client against ONNX Runtime itself, with models made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from cortex.errors import ModelError, ModelFormatError
from cortex.models.formats.detection import check_signature, detect
from cortex.models.loader import LoadRequest
from cortex.payloads.signature import TensorSignature
from cortex.predictor.clients.builder import choose_threads
from cortex.predictor.clients.onnx import OnnxClient, OnnxLoader, choose_providers

Value = helper.make_tensor_value_info


def graph(inputs: list[Any], outputs: list[Any], nodes: list[Any]) -> bytes:
    made = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString()


def identity(type_: int, shape: list[Any]) -> bytes:
    return graph([Value("x", type_, shape)], [Value("y", type_, None)], [helper.make_node("Identity", ["x"], ["y"])])


TWO_BY_TWO = graph(
    [Value("a", TensorProto.FLOAT, [None, 3]), Value("b", TensorProto.FLOAT, [3])],
    [Value("sum", TensorProto.FLOAT, None), Value("is_more", TensorProto.BOOL, None)],
    [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Greater", ["a", "b"], ["is_more"])],
)


def sequence(name: str) -> Any:
    return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)


FLOATS = Value("x", TensorProto.FLOAT, [None])
OPTIONAL = helper.make_value_info(
    "o", helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [None]))
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            graph([Value("b", TensorProto.BFLOAT16, [None])], [FLOATS], [helper.make_node("Cast", ["b"], ["x"], to=1)]),
            "has the input 'b' of the type tensor(bfloat16), which APIs without code can't have; write a class",
        ),
        (
            graph([sequence("s")], [FLOATS], [helper.make_node("ConcatFromSequence", ["s"], ["x"], axis=0)]),
            "has the input 's' of the type seq(tensor(float)),",
        ),
        (
            graph([FLOATS], [sequence("s")], [helper.make_node("SequenceConstruct", ["x"], ["s"])]),
            "has the output 's' of the type seq(tensor(float)),",
        ),
        (
            graph(
                [Value("b", TensorProto.BFLOAT16, [1]), FLOATS],
                [Value("y", TensorProto.FLOAT, None)],
                [helper.make_node("Cast", ["b"], ["c"], to=1), helper.make_node("Add", ["c", "x"], ["y"])],
            ),
            "has the input 'b' of the type tensor(bfloat16),",
        ),
        (
            graph([OPTIONAL], [FLOATS], [helper.make_node("OptionalGetElement", ["o"], ["x"])]),
            "has the input 'o' of the type optional(tensor(float)),",
        ),
    ],
)
def test_a_model_that_requests_without_code_can_not_run_is_refused_before_a_deploy_and_when_it_is_loaded(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    OnnxLoader(False, 1).load(request(tmp_path))
    with pytest.raises(ModelFormatError) as caught:
        OnnxLoader(False, 1, has_code=False).load(request(tmp_path))
    assert words in str(caught.value) and "onnx_client" in str(caught.value)
    with pytest.raises(ModelFormatError) as found:
        check_signature(detect(tmp_path))
    assert str(found.value).partition(" has the ")[2] == str(caught.value).partition(" has the ")[2]


def test_inputs_of_any_rank_differ_from_scalars_and_those_with_a_default_are_optional(tmp_path: Path) -> None:
    inputs = [
        Value("any", TensorProto.FLOAT, None),
        Value("one", TensorProto.FLOAT, []),
        Value("w", TensorProto.FLOAT, [1]),
    ]
    nodes = [helper.make_node("Sum", ["any", "one", "w"], ["y"])]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [100])
    made = helper.make_model(
        helper.make_graph(nodes, "g", inputs, [Value("y", TensorProto.FLOAT, None)], [weight]),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 15)],
    )
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    check_signature(detect(tmp_path))
    model = OnnxLoader(False, 1, has_code=False).load(request(tmp_path))
    assert model.signature.inputs == (
        TensorSignature("any", "FP32", (-1,), any_shape=True),
        TensorSignature("one", "FP32", ()),
        TensorSignature("w", "FP32", (1,), optional=True),
    )
    assert model.infer({"any": np.ones((1, 2), np.float32), "one": np.float32(3)})["y"].tolist() == [[104, 104]]


@pytest.mark.parametrize("key", [TensorProto.INT64, TensorProto.STRING])
def test_probabilities_in_maps_are_a_matrix_for_any_number_of_rows(tmp_path: Path, key: int) -> None:
    classes = (
        {"classlabels_int64s": [0, 1, 2]} if key == TensorProto.INT64 else {"classlabels_strings": ["a", "b", "c"]}
    )
    maps = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    made = helper.make_graph(
        [helper.make_node("ZipMap", ["x"], ["p"], domain="ai.onnx.ml", **classes)],
        "g",
        [Value("x", TensorProto.FLOAT, [None, 3])],
        [helper.make_value_info("p", helper.make_sequence_type_proto(maps))],
    )
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("ai.onnx.ml", 1)]
    (tmp_path / "m.onnx").write_bytes(helper.make_model(made, ir_version=8, opset_imports=opsets).SerializeToString())
    model = OnnxLoader(False, 1, has_code=False).load(request(tmp_path))
    for rows in (2, 1, 0):
        given = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        found = model.infer({"x": given})["p"]
        assert (found.dtype, found.shape, found.tolist()) == (np.float32, (rows, 3), given.tolist())


def test_data_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [1], [1])
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/hostname")
    made = helper.make_model(helper.make_graph([], "g", [], [Value("w", TensorProto.FLOAT, [1])], [tensor]))
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ModelFormatError, match="refers to data outside of its folder"):
        OnnxLoader(False, 1).load(request(tmp_path))


class Shelf:
    """Models by name, without a registry."""

    def __init__(self, folder: Path, *, wants_gpu: bool = False) -> None:
        self.loader = OnnxLoader(wants_gpu, threads=1)
        self.client = OnnxClient(self, self.loader)
        self._folder = folder
        self._models: dict[str, Any] = {}

    def add(self, name: str, content: bytes, version: str = "1") -> Path:
        folder = self._folder / name / version
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(content)
        self._models[name] = self.loader.load(request(folder, name, version))
        return folder / "model.onnx"

    def get(self, name: str | None = None, version: str = "latest") -> Any:
        return self._models[name or "m"]

    def describe(self) -> dict[str, Any]:
        return {name: {"versions": ["1"], "timestamps": [1600000000], "loaded": ["1"]} for name in self._models}


def request(folder: Path, name: str = "m", version: str = "1") -> LoadRequest:
    return LoadRequest(name, version, str(folder), "digest", 1, None)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.mark.parametrize(
    ("type_", "value", "direct"),
    [
        (TensorProto.FLOAT, [1.5, 2], np.array([1.5, 2], np.float32)),
        (TensorProto.DOUBLE, [0.1], np.array([0.1])),
        (TensorProto.FLOAT16, [0.1, 65504.0], np.array([0.1, 65504.0], np.float16)),
        (TensorProto.INT64, [2**62, -1], np.array([2**62, -1])),
        (TensorProto.UINT8, [255.0], np.array([255], np.uint8)),
        (TensorProto.BOOL, [True, False], np.array([True, False])),
        (TensorProto.STRING, ["a", "é", ""], np.array(["a", "é", ""], object)),
        (TensorProto.FLOAT, np.zeros(0), np.zeros(0, np.float32)),
        (TensorProto.FLOAT, float("nan"), np.array([float("nan")], np.float32)),
    ],
)
def test_the_answer_is_that_of_the_session_to_the_bit(shelf, type_, value, direct):
    file = shelf.add("m", identity(type_, [None]))
    expected = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": direct})
    answer = shelf.client.predict(value)
    assert isinstance(answer, list)
    assert answer[0].dtype == expected[0].dtype
    assert answer[0].shape == expected[0].shape
    assert answer[0].tolist() == expected[0].tolist() or answer[0].tobytes() == expected[0].tobytes()


def test_a_model_of_several_inputs_takes_a_dictionary_and_gives_every_output(shelf):
    shelf.add("m", TWO_BY_TWO)
    total, is_more = shelf.client.predict({"a": [[1, 2, 3], [4, 5, 6]], "b": [1, 1, 4]})
    assert total.tolist() == [[2, 3, 7], [5, 6, 10]]
    assert is_more.tolist() == [[False, True, False], [True, True, True]]


def test_a_model_tells_its_inputs_and_hands_out_its_session(shelf):
    shelf.add("m", TWO_BY_TWO)
    model = shelf.client.get_model()
    assert set(model) == {"session", "signatures", "input_signatures"}
    assert [given.name for given in model["signatures"]] == ["a", "b"]
    assert model["input_signatures"] == {
        "a": {"shape": [None, 3], "type": "float32"},
        "b": {"shape": [3], "type": "float32"},
    }
    ones = {"a": np.ones((1, 3), np.float32), "b": np.ones(3, np.float32)}
    assert model["session"].run(None, ones)[0].tolist() == [[2, 2, 2]]


def test_metadata_names_versions_and_the_inputs_of_the_newest(shelf):
    shelf.add("m", identity(TensorProto.STRING, ["n"]))
    assert shelf.client.describe() == {
        "m": {
            "versions": ["1"],
            "timestamps": [1600000000],
            "input_signatures": {"x": {"shape": ["n"], "type": "string"}},
        }
    }


def test_a_failed_run_has_the_message_of_onnxruntime(shelf):
    content = graph(
        [Value("a", TensorProto.FLOAT, ["n"]), Value("b", TensorProto.FLOAT, ["m"])],
        [Value("y", TensorProto.FLOAT, None)],
        [helper.make_node("Add", ["a", "b"], ["y"])],
    )
    shelf.add("m", content)
    with pytest.raises(ModelError) as raised:
        shelf.client.predict({"a": [1, 2], "b": [1, 2, 3]})
    assert str(raised.value).startswith("model 'm' of version 1 can't be run on this input: ")
    assert "ONNXRuntimeError" not in str(raised.value)
    assert "2 by 3" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("opset", "ir_version", "what"), [(99, 9, "opset 99"), (17, 99, "IR version 99")])
def test_a_model_that_is_newer_than_the_runtime_is_an_error_with_the_line_to_write(
    tmp_path: Path, opset: int, ir_version: int, what: str
) -> None:
    x, y = Value("x", TensorProto.FLOAT, [1]), Value("y", TensorProto.FLOAT, [1])
    made = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"^m.onnx has {what}, but onnxruntime .* supports at most .*; write onnxrun"):
        OnnxLoader(False, 1).load(request(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"), [(b"not a model", "Protobuf parsing failed"), (b"", "No graph was found in the protobuf")]
)
def test_an_invalid_file_is_reported_in_one_line(shelf, content, words):
    with pytest.raises(ModelError) as raised:
        shelf.add("m", content)
    assert "\n" not in str(raised.value)
    assert "ONNXRuntimeError" not in str(raised.value)
    assert str(raised.value) == f"model.onnx: {words}; is it an ONNX file? export it again"


def test_a_failed_load_names_the_file(shelf, tmp_path):
    values = [Value(name, TensorProto.FLOAT, [1]) for name in "xy"]
    with pytest.raises(ModelError) as raised:
        shelf.add("m", graph(values[:1], values[1:], [helper.make_node("NoSuchNode", ["x"], ["y"])]))
    assert str(raised.value).startswith("model.onnx: ")
    assert "NoSuchNode" in str(raised.value)
    assert str(tmp_path) not in str(raised.value) and "export it again" not in str(raised.value)


def test_a_folder_must_hold_one_model(shelf, tmp_path):
    with pytest.raises(ModelError, match=r"exactly one \*\.onnx file, but there are 0: none"):
        shelf.loader.load(request(tmp_path))
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).write_bytes(identity(TensorProto.FLOAT, [None]))
    with pytest.raises(ModelError, match="there are 2: a.onnx, b.onnx"):
        shelf.loader.load(request(tmp_path))
    assert shelf.loader.load(request(tmp_path / "a.onnx")).predict(1)[0].tolist() == [1]


def test_an_unloaded_model_is_described_no_more(shelf):
    shelf.add("m", identity(TensorProto.FLOAT, ["n"]))
    shelf.loader.unload(shelf.get("m"))
    assert shelf.loader.loaded() == []
    assert "input_signatures" not in shelf.client.describe()["m"]


def test_cuda_comes_first_where_it_is_wanted_and_there():
    both = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    assert choose_providers(True, both) == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert choose_providers(False, both) == ["CPUExecutionProvider"]
    assert choose_providers(True, ["CPUExecutionProvider"]) == ["CPUExecutionProvider"]


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="there is one")
def test_logs_that_onnxruntime_can_not_use_the_gpu(tmp_path, capsys):
    Shelf(tmp_path, wants_gpu=True).add("m", identity(TensorProto.FLOAT, ["n"]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("onnx: models run on the CPU: the installed onnxruntime has no CUDA")


def test_threads_are_shared_among_processes_and_models_unless_configured(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert choose_threads(16, 1) == 16
    assert choose_threads(4, 1) == 4
    assert choose_threads(16, 16) == 4
    assert choose_threads(1, 300) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_threads(4, 300) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # the share, which the worker has set
    assert choose_threads(4, 300) == 1
