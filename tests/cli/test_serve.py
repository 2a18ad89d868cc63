"""`cortex serve`: the API and the project that follow from a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.cli.commands.projects import serve
from cortex.cli.model_request import model_request, model_requests
from cortex.errors import InputError


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/models/iris.onnx", "iris"),
        ("/models/My Model.v2.onnx", "my-model-v2"),
        ("/models/iris/", "iris"),
        ("/models/iris/3", "iris"),
        ("s3://bucket/flowers/2.onnx", "flowers"),
        ("/models/2024-iris.joblib", "iris"),
        ("/" + "x" * 60, "x" * 42),
    ],
)
def test_the_name_of_the_api_is_that_of_the_file(location: str, name: str) -> None:
    assert serve._name(location) == name


def test_a_file_whose_name_is_none_of_an_api_needs_one() -> None:
    with pytest.raises(InputError, match="give one with --name"):
        serve._name("/123")


def test_a_path_through_the_parent_folder_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "iris.onnx").touch()
    monkeypatch.chdir(tmp_path / "project")
    assert serve._location("../iris.onnx") == str((tmp_path / "iris.onnx").resolve())


def test_a_missing_model_is_refused_with_one_of_a_similar_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "iris.onnx").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^irsi.onnx: no such file or folder; did you mean iris.onnx\?$"):
        serve._location("irsi.onnx")
    with pytest.raises(InputError, match=r"did you mean .*/iris.onnx\?$"):
        serve._location(f"{tmp_path}/iris.onx")
    with pytest.raises(InputError, match="no such file or folder; give the path of a model"):
        serve._location("nowhere/model")


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ([("x", "FP32", [-1, 4])], '{"instances": [[0, 0, 0, 0]]}'),
        ([("x", "INT64", [-1])], '{"instances": [0]}'),
        ([("x", "BYTES", [-1, 1])], '{"instances": [["text"]]}'),
        ([("x", "FP32", [2, 1])], '{"instances": [[0], [0]]}'),
        ([("a", "FP32", [-1, 1]), ("b", "BYTES", [-1, 1])], '{"instances": [{"a": [0], "b": ["text"]}]}'),
    ],
)
def test_the_printed_request_has_a_row_of_zeros(inputs: list[tuple[str, str, list[int]]], body: str) -> None:
    tensors = [dict(zip(("name", "datatype", "shape"), each, strict=True)) for each in inputs]
    assert f"-d '{body}'" in model_request({"inputs": tensors}, "http://localhost:8888/iris")


def test_each_request_to_one_of_several_models_names_it() -> None:
    models = [{"name": name, "inputs": []} for name in ("iris", "ü b", "c", "d", "e")]
    assert "?model" not in model_requests(models[:1], "http://h/m")[0]
    first, second, third, rest = model_requests(models, "http://h/m")
    assert first.startswith("curl 'http://h/m?model=iris' -H")
    assert "'http://h/m?model=%C3%BC%20b'" in second
    assert third.startswith("curl 'http://h/m?model=c'")
    assert rest == "and 2 more models, each with ?model=NAME"


def test_large_rows_are_described() -> None:
    tensor = {"name": "image", "datatype": "FP32", "shape": [-1, 3, 224, 224]}
    assert "image FP32 [?, 3, 224, 224]" in model_request({"inputs": [tensor]}, "http://localhost:8888/iris")
