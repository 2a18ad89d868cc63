"""A substitute for `tensorflow_model_server`, which no package registry distributes: TensorFlow behind gRPC.

It uses the official stubs of messages and services, so its wire format is the real one. It accepts those flags of the
real server that the code under test passes, and rejects others.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.framework.tensor_util import GetNumpyAppendFn
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)
from tensorflow_serving.config import model_server_config_pb2

State = get_model_status_pb2.ModelVersionStatus.State
_INVALID, _NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


class Servable:
    """One version of one model, loading or loaded."""

    def __init__(self, folder: Path) -> None:
        self.version = int(folder.name)
        self.state = State.LOADING
        self.error = ""
        self.signature_defs: dict[str, Any] = {}
        try:
            self.model = tf.saved_model.load(str(folder))
            file = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
            self.signature_defs = dict(file.meta_graphs[0].signature_def)
            self.state = State.AVAILABLE
        except Exception as error:
            self.state, self.error = State.END, str(error)


class Servables:
    """The configured models by name."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.by_name: dict[str, tuple[str, Servable]] = {}

    def configure(self, config: model_server_config_pb2.ModelServerConfig) -> str:
        """Load new versions and unload those that are not configured; return the first error."""
        with self._turn:
            wanted = {model.name: model.base_path for model in config.model_config_list.config}
            for name in set(self.by_name) - set(wanted):
                del self.by_name[name]
            for name, base_path in wanted.items():
                if self.by_name.get(name, ("", None))[0] != base_path:
                    newest = max(Path(base_path).iterdir(), key=lambda folder: int(folder.name))
                    self.by_name[name] = base_path, Servable(newest)
            return next((s.error for _, s in self.by_name.values() if s.error), "")

    def find(self, spec: Any, context: grpc.ServicerContext) -> Servable:
        found = self.by_name.get(spec.name)
        number = spec.version.value if spec.HasField("version") else None
        if found is None or found[1].state != State.AVAILABLE or number not in (None, found[1].version):
            asked = f"Latest({spec.name})" if number is None else f"Specific({spec.name}, {number})"
            context.abort(_NOT_FOUND, f"Servable not found for request: {asked}")
        return found[1]


class Prediction(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, servables: Servables) -> None:
        self._servables = servables

    def Predict(self, request: Any, context: grpc.ServicerContext) -> Any:
        servable = self._servables.find(request.model_spec, context)
        key = request.model_spec.signature_name or "serving_default"
        definition = servable.signature_defs.get(key)
        if definition is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f'Serving signature key "{key}" not found.')
        if set(request.inputs) != set(definition.inputs):
            context.abort(_INVALID, "input tensor alias not found in signature")
        try:
            for name, given in request.inputs.items():
                if given.dtype != definition.inputs[name].dtype:
                    context.abort(_INVALID, f"input {name} has type {given.dtype}")
            tensors = {name: tf.constant(tf.make_ndarray(given)) for name, given in request.inputs.items()}
            found = servable.model.signatures[key](**tensors)
        except tf.errors.InvalidArgumentError as error:
            context.abort(_INVALID, error.message)
        response = predict_pb2.PredictResponse(model_spec=request.model_spec)
        response.model_spec.version.value = servable.version
        response.model_spec.signature_name = key
        for name, tensor in found.items():
            response.outputs[name].CopyFrom(_as_fields(tensor))
        return response

    def GetModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:
        if list(request.metadata_field) != ["signature_def"]:
            context.abort(_INVALID, f"Metadata field {request.metadata_field} is not supported")
        servable = self._servables.find(request.model_spec, context)
        response = get_model_metadata_pb2.GetModelMetadataResponse(model_spec=request.model_spec)
        response.model_spec.version.value = servable.version
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for key, definition in servable.signature_defs.items():
            signatures.signature_def[key].CopyFrom(definition)
        response.metadata["signature_def"].Pack(signatures)
        return response


class Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, servables: Servables) -> None:
        self._servables = servables

    def GetModelStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        name = request.model_spec.name
        if not name:
            context.abort(_INVALID, "Missing ModelSpec")
        if name not in self._servables.by_name:
            context.abort(_NOT_FOUND, f"Could not find any versions of model {name}")
        servable = self._servables.by_name[name][1]
        response = get_model_status_pb2.GetModelStatusResponse()
        status = response.model_version_status.add(version=servable.version, state=servable.state)
        status.status.error_message = servable.error
        return response

    def HandleReloadConfigRequest(self, request: Any, context: grpc.ServicerContext) -> Any:
        response = model_management_pb2.ReloadConfigResponse()
        error = self._servables.configure(request.config)
        if error:
            response.status.error_code, response.status.error_message = 2, error
        return response


def _as_fields(tensor: Any) -> Any:
    """Write a tensor as the real server does: value by value, not as the bytes of memory."""
    array = tensor.numpy()
    proto = tensor_pb2.TensorProto(dtype=tensor.dtype.as_datatype_enum, tensor_shape=tensor.shape.as_proto())
    if proto.dtype == types_pb2.DT_STRING:
        proto.string_val.extend(np.asarray(array, object).ravel().tolist())
    elif array.size:
        GetNumpyAppendFn(array.dtype)(proto, array.ravel())
    return proto


def _main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8500)
    parser.add_argument("--grpc_socket_path", default="")
    parser.add_argument("--rest_api_port", type=int, default=0)
    parser.add_argument("--model_config_file", default="")
    parser.add_argument("--max_num_load_retries", type=int, default=5)
    flags = parser.parse_args()
    servables = Servables()
    if flags.model_config_file:
        text = Path(flags.model_config_file).read_text()
        servables.configure(text_format.Parse(text, model_server_config_pb2.ModelServerConfig()))
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), options=limits)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Prediction(servables), server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(Models(servables), server)
    if flags.grpc_socket_path:
        server.add_insecure_port(f"unix:{flags.grpc_socket_path}")
    if flags.port:
        server.add_insecure_port(f"127.0.0.1:{flags.port}")
    server.start()
    print(f"Running gRPC ModelServer, process {os.getpid()}", file=sys.stderr, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    _main()
