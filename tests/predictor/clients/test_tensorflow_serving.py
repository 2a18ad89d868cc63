"""The wire: our messages against a server of the official stubs that runs real models with TensorFlow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cortex.errors import ModelError
from cortex.models.loader import LoadRequest
from cortex.models.spec import DEFAULT_MODEL, ModelPath, ModelSource
from cortex.predictor.clients.tensorflow_serving import (
    MESSAGES,
    ExternalModels,
    ServedModel,
    ServingChannel,
    config_request,
    metadata_request,
)
from harness.models.serving_conformance import check_outputs_are_those_of_tensorflow
from harness.models.tensorflow_models import make
from harness.ports import free_port
from harness.wait import wait_until

#: The models are those of test_embedded_tensorflow.py, whose outputs `make test` compares.
pytestmark = [pytest.mark.processes, pytest.mark.long]

ROW = [5.1, 3.5, 1.4, 0.2]
SERVER = Path(__file__).parents[2] / "harness" / "models" / "tensorflow_model_server.py"
DIR = ModelSource("tensorflow", dir="s3://bucket/models")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that are served."""
    return make(tmp_path_factory)


@pytest.fixture(scope="module")
def base(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models as a server finds them: each has a folder, below which it is version 3."""
    base = tmp_path_factory.mktemp("served") / "models"
    for model in folder.iterdir():
        if (model / "saved_model.pb").exists():
            (base / model.name).mkdir(parents=True)
            (base / model.name / "3").symlink_to(model, target_is_directory=True)
    return base


@pytest.fixture(scope="module")
def address(base: Path) -> Iterator[str]:
    """A server of them."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), f"--port={port}"])
    connection = ServingChannel(f"127.0.0.1:{port}")
    try:
        models = {path.name: str(path) for path in base.iterdir()}
        wait_until(lambda: _configure(connection, models), timeout_s=60)
        yield f"127.0.0.1:{port}"
    finally:
        connection.close()
        process.kill()
        process.wait()


def _configure(connection: ServingChannel, models: dict[str, str]) -> bool:
    try:
        return connection.call("HandleReloadConfigRequest", config_request(models)).status.error_code == 0
    except grpc.RpcError:
        return False


class OnServer:
    """A backend whose models a server has already."""

    def __init__(self, connection: ServingChannel) -> None:
        self._connection = connection

    def load(self, request: LoadRequest) -> ServedModel:
        metadata = self._connection.call("GetModelMetadata", metadata_request(request.model, None))
        return ServedModel(self._connection, request.model, None, request, metadata)

    def unload(self, servable: ServedModel) -> None: ...
    def close(self) -> None: ...


def test_outputs_equal_those_of_calling_tensorflow_to_the_bit(address: str, folder: Path) -> None:
    check_outputs_are_those_of_tensorflow(OnServer(ServingChannel(address)), folder)


def test_our_messages_are_the_official_ones() -> None:
    """Compare names, numbers, types and cardinalities with the stubs' descriptors, in a process of its own."""
    checked = subprocess.run([sys.executable, "-c", _COMPARE], capture_output=True, text=True, timeout=280)
    assert not checked.returncode, checked.stderr
    assert int(checked.stdout) == len(MESSAGES)


_COMPARE = """
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, get_model_metadata_pb2, get_model_status_pb2, model_management_pb2
from tensorflow_serving.apis import prediction_service_pb2, model_service_pb2
from google.protobuf import any_pb2, wrappers_pb2, descriptor_pool
from cortex.predictor.clients.tensorflow_serving import MESSAGES, METHODS
official = descriptor_pool.Default()
inner = {"tensorflow.Dim": "tensorflow.TensorShapeProto.Dim"}
for ours in (message.DESCRIPTOR for message in MESSAGES.values()):
    theirs = official.FindMessageTypeByName(inner.get(ours.full_name, ours.full_name))
    for field in ours.fields:
        other = theirs.fields_by_number[field.number]
        # An enumeration is an int32 on the wire.
        kind = 5 if other.type == 14 else other.type
        assert (field.name, field.type, field.is_repeated) == (other.name, kind, other.is_repeated), field.full_name
        if field.message_type and not field.message_type.GetOptions().map_entry:
            name = field.message_type.full_name
            assert inner.get(name, name) == other.message_type.full_name
        elif field.message_type:
            assert other.message_type.GetOptions().map_entry
for service, methods in METHODS.items():
    for name, (request, response) in methods.items():
        method = official.FindServiceByName(service).methods_by_name[name]
        assert (method.input_type.name, method.output_type.name) == (request, response)
print(len(MESSAGES))
"""


def test_answers_are_those_of_protobufs_json_mapping(address: str) -> None:
    """Handlers of old were given `MessageToDict` of the official response: only floats are told more exactly now."""
    models = ExternalModels(address, DIR)
    answer = models.get("iris").predict({"x": [ROW]})
    script = _OFFICIAL_PREDICT.format(address=address, row=ROW)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280)
    assert not done.returncode, done.stderr
    official: dict[str, Any] = json.loads(done.stdout)
    assert answer["class_ids"] == official["class_ids"]["int64Val"]
    assert answer["classes"] == official["classes"]["stringVal"]
    assert answer["scores"] == pytest.approx(official["scores"]["floatVal"])


_OFFICIAL_PREDICT = """
import grpc, json, tensorflow as tf
from google.protobuf import json_format
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
stub = prediction_service_pb2_grpc.PredictionServiceStub(grpc.insecure_channel("{address}"))
request = predict_pb2.PredictRequest()
request.model_spec.name = "iris"
request.inputs["x"].CopyFrom(tf.make_tensor_proto([{row}], dtype=tf.float32))
print(json.dumps(json_format.MessageToDict(stub.Predict(request))["outputs"]))
"""


def test_a_model_of_path_is_asked_for_by_the_name_of_its_folder(address: str) -> None:
    source = ModelSource("tensorflow", paths=(ModelPath(DEFAULT_MODEL, "s3://bucket/models/iris"),))
    models = ExternalModels(address, source)
    assert models.get("anything").predict({"x": [ROW]}) == models.get().predict({"x": ROW})


def test_a_version_is_asked_for_only_when_given(address: str) -> None:
    models = ExternalModels(address, DIR)
    latest, third = models.get("iris"), models.get("iris", "3")
    assert latest.predict({"x": [ROW]}) == third.predict({"x": [ROW]})
    with pytest.raises(ModelError, match="model iris of version 4 wasn't found .*Specific"):
        models.get("iris", "4")
    with pytest.raises(ModelError, match="model_version must be either a parse-able numeric value or 'latest'"):
        models.get("iris", "new")


def test_unknown_models_are_reported_with_the_known_ones(address: str) -> None:
    with pytest.raises(ModelError, match="'rose' model wasn't found in the list of available models of TensorFlow"):
        ExternalModels(address, DIR).get("rose")
    paths = (ModelPath("iris", "s3://bucket/iris"), ModelPath("same-bool", "s3://bucket/b"))
    models = ExternalModels(address, ModelSource("tensorflow", paths=paths))
    with pytest.raises(ModelError, match=r"model_name was not specified, .*\['iris', 'same-bool'\]"):
        models.get()
    with pytest.raises(ModelError, match=r"'rose' model wasn't found .*\['iris', 'same-bool'\]"):
        models.get("rose")


def test_errors_of_the_server_are_reported(address: str) -> None:
    model = ExternalModels(address, ModelSource("tensorflow", dir="s3://b/m", signature_key="checked")).get("several")
    with pytest.raises(ModelError, match="model 'several' of version latest failed: .*every x must be positive"):
        model.predict({"x": [-1.0]})


def test_a_missing_signature_is_reported_with_the_available_ones(address: str) -> None:
    models = ExternalModels(address, ModelSource("tensorflow", dir="s3://b/m", signature_key="classify"))
    with pytest.raises(ModelError, match=r"signature_key 'classify' is not .*'any_rank', 'checked', 'predict'"):
        models.get("several")


def test_big_inputs_are_sent(address: str) -> None:
    rows = [ROW] * 400_000  # 6.4 MB; gRPC's own limit is 4
    assert len(ExternalModels(address, DIR).get("iris").predict({"x": rows})["class_ids"]) == 400_000


def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(ModelError, match=r"TensorFlow Serving at 127\.0\.0\.1:1 can't be reached"):
        ExternalModels("127.0.0.1:1", DIR).get("iris")


def test_a_new_version_on_the_server_is_noticed(address: str, base: Path, folder: Path) -> None:
    connection = ServingChannel(address)
    models = ExternalModels(address, DIR)
    served = {path.name: str(path) for path in base.iterdir()}
    for version, kind in ((1, "same-int32"), (2, "same-int64")):
        changing = base.parent / f"changing-{version}"
        shutil.copytree(folder / kind, changing / str(version))
        assert _configure(connection, {**served, "changing": str(changing)})
        if version == 1:
            assert models.get("changing").predict({"x": [[1, 2]]})["changed"] == [2, 3]
    with pytest.raises(ModelError, match="input x has type"):  # as the signatures say that are known
        models.get("changing").predict({"x": [[1, 2]]})
    assert models.get("changing").predict({"x": [[1, 2]]})["changed"] == ["2", "3"]
