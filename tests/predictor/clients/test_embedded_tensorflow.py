"""Real TensorFlow in this process, on models that it exported in another."""

from __future__ import annotations

import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cortex.errors import ModelError, ModelFormatError
from cortex.models.formats.detection import detect
from cortex.predictor.clients.embedded_tensorflow import EmbeddedModel, EmbeddedTensorFlow
from cortex.predictor.clients.tensorflow import TensorFlowLoader, TensorFlowModel
from cortex.predictor.clients.tensors import TensorSpec
from cortex.predictor.estimators.loader import DetectedLoader
from harness.models.serving_conformance import check_outputs_are_those_of_tensorflow, request
from harness.models.tensorflow_models import make

pytestmark = [pytest.mark.processes, pytest.mark.long]

ROW = [5.1, 3.5, 1.4, 0.2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that are served."""
    return make(tmp_path_factory)


def load(folder: Path, model: str, signature_key: str | None = None) -> TensorFlowModel[EmbeddedModel]:
    return TensorFlowLoader(EmbeddedTensorFlow()).load(request(folder, model, signature_key))


def test_outputs_equal_those_of_calling_tensorflow_to_the_bit(folder: Path) -> None:
    check_outputs_are_those_of_tensorflow(EmbeddedTensorFlow(), folder)


def test_only_graphs_that_reach_files_need_trust(folder: Path) -> None:
    reasons = {each.name: detect(each).code for each in folder.iterdir() if each.is_dir()}
    need_trust = {name: reason.rpartition(": ")[2] for name, reason in reasons.items() if reason}
    assert need_trust == {"hostile": "ReadFile, WriteFile", "version-1": "InitializeTableFromTextFileV2"}
    with pytest.raises(ModelFormatError, match="ReadFile, WriteFile; write `trust: pickle` if you trust it"):
        DetectedLoader().load(request(folder, "hostile", None))
    assert not (folder / "written").exists()


def test_signatures_have_types_and_shapes(folder: Path) -> None:
    model = load(folder, "several")
    assert set(model.servable.signatures) >= {"predict", "checked", "any_rank"}
    inputs = model.servable.signatures["predict"].inputs
    assert {name: (spec.type_name, spec.shape) for name, spec in inputs.items()} == {
        "a": ("DT_FLOAT", ()),
        "b": ("DT_INT32", (None,)),
    }
    assert model.servable.signatures["any_rank"].inputs["x"].shape is None


def test_predict_answers_with_flat_lists(folder: Path) -> None:
    answer = load(folder, "iris").predict({"x": [ROW, ROW]})
    assert [len(answer[name]) for name in ("scores", "class_ids", "classes")] == [6, 2, 2]
    assert all(type(value) is float for value in answer["scores"])
    assert all(value in ("0", "1", "2") for value in answer["class_ids"])


def test_a_failed_operation_has_the_message_of_tensorflow(folder: Path) -> None:
    model = load(folder, "several", "checked")
    assert model.predict({"x": 4}) == {"root": [2.0]}
    with pytest.raises(ModelError, match="every x must be positive"):
        model.predict({"x": -1})
    assert model.predict({"x": 9}) == {"root": [3.0]}


def test_a_folder_without_a_saved_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="TensorFlow can't load the model: .*saved_model.pb"):
        EmbeddedTensorFlow().load(request(tmp_path, "empty"))


def test_a_truncated_saved_model_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = folder / "iris"
    for file in [path for path in whole.rglob("*") if path.is_file()]:
        copy = tmp_path / "cut" / file.relative_to(whole)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelError, match="TensorFlow can't load the model"):
        EmbeddedTensorFlow().load(request(tmp_path, "cut"))


def test_threads_may_call_a_model_at_once_and_none_fails_when_it_is_unloaded(folder: Path) -> None:
    backend = EmbeddedTensorFlow()
    model = backend.load(request(folder, "iris"))
    x = np.array([ROW], np.float32)
    expected = model.run("serving_default", {"x": x})["scores"].tolist()

    def call(turn: int) -> bool:
        if turn == 150:
            backend.unload(model)
        try:
            return model.run("serving_default", {"x": x})["scores"].tolist() == expected
        except ModelError as error:
            return turn >= 100 and "has been unloaded" in str(error)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(call, range(200)))


def test_nothing_is_left_of_a_model_that_was_unloaded(folder: Path) -> None:
    loader = TensorFlowLoader(EmbeddedTensorFlow())
    model = loader.load(request(folder, "version-1"))
    session = model.servable._session
    left = weakref.ref(session), weakref.ref(session.graph), weakref.ref(model)
    del session
    loader.unload(model)
    del model
    assert [each() for each in left] == [None, None, None]


def test_no_garbage_collection_walks_tensorflow() -> None:
    code = "import gc; from cortex.predictor.clients import embedded_tensorflow as t\n"
    code += "t._import_tensorflow(); assert len(gc.get_objects()) < gc.get_freeze_count()"
    subprocess.run([sys.executable, "-c", code], timeout=280, check=True)


def test_a_signature_of_unknown_types_can_still_be_described(folder: Path) -> None:
    model = load(folder, "iris")
    model._signature = type(model._signature)({"x": TensorSpec(21, (None,))}, {})
    assert model.describe(1)["input_signatures"] == {"x": {"shape": [-1], "type": "DT_21"}}
    model.warm_up()
