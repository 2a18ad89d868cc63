"""TensorFlow Serving over gRPC: its messages, one channel, and the models of an external server.

The names and numbers in `_TABLE` are part of the wire format. Their classes are created in a private descriptor pool:
TensorFlow and the official stubs register files of the same names, and one process may import both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from cortex.errors import ModelError, ModelInputError
from cortex.models.loader import LoadRequest
from cortex.models.registry import check_version, format_names
from cortex.models.spec import DEFAULT_MODEL, LATEST, ModelSource
from cortex.payloads.arrays import Array
from cortex.predictor.clients.tensorflow import SignatureInfo, TensorFlowModel, clean_message, read_signature
from cortex.predictor.clients.tensors import DTYPES

#: Package → message → fields as "number name type"; `*` marks repeated fields, `map:` maps from strings. Enumerations
#: are integers, as on the wire.
_TABLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "google.protobuf": {
        "Int64Value": ("1 value int64",),
        "Any": ("1 type_url string", "2 value bytes"),
    },
    "tensorflow": {
        "Dim": ("1 size int64",),
        "TensorShapeProto": ("2 dim tensorflow.Dim *", "3 unknown_rank bool"),
        "TensorProto": (
            "1 dtype int32",
            "2 tensor_shape tensorflow.TensorShapeProto",
            "4 tensor_content bytes",
            "5 float_val float *",
            "6 double_val double *",
            "7 int_val int32 *",
            "8 string_val bytes *",
            "9 scomplex_val float *",
            "10 int64_val int64 *",
            "11 bool_val bool *",
            "12 dcomplex_val double *",
            "13 half_val int32 *",
            "16 uint32_val uint32 *",
            "17 uint64_val uint64 *",
        ),
        "TensorInfo": ("1 name string", "2 dtype int32", "3 tensor_shape tensorflow.TensorShapeProto"),
        "SignatureDef": (
            "1 inputs map:tensorflow.TensorInfo",
            "2 outputs map:tensorflow.TensorInfo",
            "3 method_name string",
        ),
    },
    "tensorflow.serving": {
        "ModelSpec": ("1 name string", "2 version google.protobuf.Int64Value", "3 signature_name string"),
        "PredictRequest": ("1 model_spec tensorflow.serving.ModelSpec", "2 inputs map:tensorflow.TensorProto"),
        "PredictResponse": ("1 outputs map:tensorflow.TensorProto", "2 model_spec tensorflow.serving.ModelSpec"),
        "GetModelMetadataRequest": ("1 model_spec tensorflow.serving.ModelSpec", "2 metadata_field string *"),
        "GetModelMetadataResponse": (
            "1 model_spec tensorflow.serving.ModelSpec",
            "2 metadata map:google.protobuf.Any",
        ),
        "SignatureDefMap": ("1 signature_def map:tensorflow.SignatureDef",),
        "StatusProto": ("1 error_code int32", "2 error_message string"),
        "GetModelStatusRequest": ("1 model_spec tensorflow.serving.ModelSpec",),
        "ModelVersionStatus": ("1 version int64", "2 state int32", "3 status tensorflow.serving.StatusProto"),
        "GetModelStatusResponse": ("1 model_version_status tensorflow.serving.ModelVersionStatus *",),
        "ModelConfig": ("1 name string", "2 base_path string", "4 model_platform string"),
        "ModelConfigList": ("1 config tensorflow.serving.ModelConfig *",),
        "ModelServerConfig": ("1 model_config_list tensorflow.serving.ModelConfigList",),
        "ReloadConfigRequest": ("1 config tensorflow.serving.ModelServerConfig",),
        "ReloadConfigResponse": ("1 status tensorflow.serving.StatusProto",),
    },
}
#: Service → method → (request, response).
METHODS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "tensorflow.serving.PredictionService": {
        "Predict": ("PredictRequest", "PredictResponse"),
        "GetModelMetadata": ("GetModelMetadataRequest", "GetModelMetadataResponse"),
    },
    "tensorflow.serving.ModelService": {
        "GetModelStatus": ("GetModelStatusRequest", "GetModelStatusResponse"),
        "HandleReloadConfigRequest": ("ReloadConfigRequest", "ReloadConfigResponse"),
    },
}
#: States of a version in `ModelVersionStatus.State`.
AVAILABLE, END = 30, 50

_SIGNATURES = "signature_def"  #: the field to request
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("int32", "int64", "uint32", "uint64", "float", "double", "bool", "string", "bytes")
}
#: Number of a type → the field of values that are not in `tensor_content`.
_VALUE_FIELDS = {
    1: "float_val", 2: "double_val", 3: "int_val", 4: "int_val", 5: "int_val", 6: "int_val", 7: "string_val",
    8: "scomplex_val", 9: "int64_val", 10: "bool_val", 14: "half_val", 17: "int_val", 18: "dcomplex_val",
    19: "half_val", 22: "uint32_val", 23: "uint64_val",
}  # fmt: skip
_STRING, _COMPLEX64, _BFLOAT16, _COMPLEX128, _HALF = 7, 8, 14, 18, 19


def _describe(package: str, messages: Mapping[str, tuple[str, ...]]) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    file.dependency.extend(f"{name}.proto" for name in list(_TABLE)[: list(_TABLE).index(package)])
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for row in fields:
            number, field_name, kind, *repeated = row.split()
            field = message.field.add(name=field_name, number=int(number), label=_Field.LABEL_OPTIONAL)
            if kind.startswith("map:"):
                entry = message.nested_type.add(name=f"{field_name.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
                value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
                _set_type(value, kind.removeprefix("map:"))
                kind, repeated = f"{package}.{name}.{entry.name}", ["*"]
            _set_type(field, kind)
            if repeated:
                field.label = _Field.LABEL_REPEATED
    return file


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{kind}"


def _make_classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    for package, messages in _TABLE.items():
        pool.Add(_describe(package, messages))  # type: ignore[no-untyped-call,unused-ignore]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for package, messages in _TABLE.items()
        for name in messages
    }


#: Message classes by name, without the package.
MESSAGES: Mapping[str, Any] = _make_classes()


def model_spec(name: str, version: str | None, signature: str = "") -> Any:
    """Return the `ModelSpec` of a version; without one, the server uses its latest."""
    number = None if version is None else MESSAGES["Int64Value"](value=int(version))
    return MESSAGES["ModelSpec"](name=name, version=number, signature_name=signature)


def metadata_request(name: str, version: str | None) -> Any:
    """Return a request for the signatures of a model."""
    return MESSAGES["GetModelMetadataRequest"](model_spec=model_spec(name, version), metadata_field=[_SIGNATURES])


def predict_request(name: str, version: str | None, signature: str, inputs: Mapping[str, Array], specs: Any) -> Any:
    """Return a request to run a signature; `specs` are its inputs."""
    request = MESSAGES["PredictRequest"](model_spec=model_spec(name, version, signature))
    for key, array in inputs.items():
        write_tensor(request.inputs[key], array, specs[key].dtype)
    return request


def config_request(folders: Mapping[str, str]) -> Any:
    """Return a request to serve exactly `folders`: name → the folder with numbered versions."""
    request = MESSAGES["ReloadConfigRequest"]()
    request.config.model_config_list.SetInParent()
    for name, folder in folders.items():
        request.config.model_config_list.config.add(name=name, base_path=folder, model_platform="tensorflow")
    return request


def read_signatures(response: Any) -> dict[str, SignatureInfo]:
    """Return the signatures in a metadata response. Raises: KeyError, google.protobuf.message.DecodeError."""
    packed = response.metadata.get(_SIGNATURES)
    if packed is None or packed.type_url.rpartition("/")[2] != "tensorflow.serving.SignatureDefMap":
        raise KeyError(_SIGNATURES)
    found = MESSAGES["SignatureDefMap"].FromString(packed.value).signature_def
    return {key: read_signature(found[key]) for key in sorted(found)}


def write_tensor(tensor: Any, array: Array, dtype: int) -> None:
    """Fill a `TensorProto`; numbers are sent as bytes, the fastest form that servers accept."""
    tensor.dtype = dtype
    for size in array.shape:
        tensor.tensor_shape.dim.add(size=size)
    tensor.tensor_shape.SetInParent()
    if dtype == _STRING:
        tensor.string_val.extend(array.ravel().tolist())
    elif dtype == _BFLOAT16:
        tensor.tensor_content = _to_bfloat16(array).tobytes()
    else:
        tensor.tensor_content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def read_tensor(tensor: Any) -> Array:
    """Read a `TensorProto` in any of its forms. Raises: ValueError if it is malformed or of an unsupported type."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"a tensor has the unsupported type {tensor.dtype}")
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    if tensor.tensor_content and dtype.number != _STRING:
        raw = np.uint16 if dtype.number == _BFLOAT16 else dtype.numpy.newbyteorder("<")
        flat: Array = np.frombuffer(tensor.tensor_content, raw)
        flat = _from_bfloat16(flat) if dtype.number == _BFLOAT16 else flat
    else:
        flat = _read_values(getattr(tensor, _VALUE_FIELDS[dtype.number])[:], dtype.number)
    if len(flat) < count:
        # Equal values at the end may be omitted: the last value is repeated, or zero if there is none.
        last = flat[-1] if len(flat) else (b"" if dtype.number == _STRING else dtype.numpy.type(0))
        padding: Array = np.empty(count - len(flat), dtype.numpy)
        padding[:] = last
        flat = np.concatenate([flat, padding])
    return flat.reshape(shape)


def _read_values(values: list[Any], dtype: int) -> Array:
    if dtype == _STRING:
        strings = np.empty(len(values), np.object_)
        strings[:] = values
        return strings
    if dtype in (_COMPLEX64, _COMPLEX128):
        return np.array(values, np.float32 if dtype == _COMPLEX64 else np.float64).view(DTYPES[dtype].numpy)
    if dtype == _HALF:
        return np.array(values, np.uint16).view(np.float16)
    if dtype == _BFLOAT16:
        return _from_bfloat16(np.array(values, np.uint16))
    return np.array(values, DTYPES[dtype].numpy)


def _to_bfloat16(array: Array) -> Array:
    """Round floats to their upper 16 bits, half to even, like TensorFlow."""
    bits = np.ascontiguousarray(array, "<f4").view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding up could turn a NaN into another value.
    return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype("<u2")


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


#: Limit of calls outside of requests, which have their own timeout.
CALL_TIMEOUT_S = 300.0
#: gRPC's limit of 4 MiB is too small for images, and for the metadata of models with thousands of inputs.
_UNLIMITED = -1
_RECONNECT_MS = 1000


class UnreachableError(ModelError):
    """The server can't be reached."""


class ServingChannel:
    """A gRPC channel to one server and its methods. Connects on first use, and reconnects after failures."""

    def __init__(self, target: str) -> None:
        """Create the channel; `target` is `host:port`, or `unix:` and a path."""
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC logs only errors
        self.target = target
        options = [
            ("grpc.max_send_message_length", _UNLIMITED),
            ("grpc.max_receive_message_length", _UNLIMITED),
            # By default, the backoff grows to two minutes.
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS // 10),
            ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS // 10),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
            # By default, channels with equal options share connections, and one would keep the backoff of another
            # although the server is up again.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(target, options=options)
        self._calls = {
            name: self._channel.unary_unary(
                f"/{service}/{name}",
                request_serializer=MESSAGES[request].SerializeToString,
                response_deserializer=MESSAGES[response].FromString,
            )
            for service, methods in METHODS.items()
            for name, (request, response) in methods.items()
        }

    def call(self, method: str, request: Any, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """Call a method and return its response. Raises: grpc.RpcError, which is a grpc.Call."""
        return self._calls[method](request, timeout=timeout_s)

    def close(self) -> None:
        """Close the channel; running calls fail."""
        self._channel.close()


class ServedModel:
    """A model that a server has loaded: the `Servable` of both backends with servers."""

    def __init__(
        self,
        channel: ServingChannel,
        name: str,
        version: str | None,
        request: LoadRequest,
        metadata: Any,
    ) -> None:
        """Read the signatures; `name` is the server's, `metadata` its response to `metadata_request`.

        Raises: ModelError.
        """
        try:
            self.signatures: Mapping[str, SignatureInfo] = read_signatures(metadata)
        except (KeyError, DecodeError):
            raise ModelError(f"{request.label}: {channel.target} sent no valid signatures") from None
        self.name = name
        #: The server may serve another version than that of `signatures`.
        self.is_outdated = False
        self._channel = channel
        self._requested_version = version
        self._served_version: int = metadata.model_spec.version.value
        self._request = request

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature on the server. Raises: ModelError with the message of the server."""
        specs = self.signatures[signature_key].inputs
        try:
            request = predict_request(self.name, self._requested_version, signature_key, inputs, specs)
            response = self._channel.call("Predict", request)
        except grpc.RpcError as error:
            self.is_outdated = True
            raise_call_error(error, self._channel.target, self._request)
        except ValueError as error:  # protobuf: over 2 GiB
            raise ModelError(f"input of {self._request.label} can't be sent: {error}") from None
        if self._requested_version is None and response.model_spec.version.value != self._served_version:
            self.is_outdated = True
        try:
            return {name: read_tensor(response.outputs[name]) for name in sorted(response.outputs)}
        except ValueError as error:
            raise ModelError(f"the response of {self._request.label} can't be read: {error}") from None


class ExternalModels:
    """The models of an external server, which loads and manages them itself."""

    def __init__(self, address: str, source: ModelSource) -> None:
        self._source = source
        self._channel = ServingChannel(address)
        self._models: dict[tuple[str, str], TensorFlowModel[ServedModel]] = {}
        self._lock = threading.Lock()

    def get(self, name: str | None = None, version: str = LATEST) -> TensorFlowModel[ServedModel]:
        """Return a model; its signatures are fetched once, and again when they may be outdated. Raises: ModelError."""
        number = check_version(version)
        server_name, signature_key = self._find(name)
        known = self._models.get((server_name, number))
        if known is not None and not known.servable.is_outdated:
            return known
        # No lock: two threads may fetch the same signatures.
        request = LoadRequest(server_name, number, "", "", 0, signature_key)
        model = TensorFlowModel(request, self._open(request))
        with self._lock:
            self._models[server_name, number] = model
        return model

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the models that have been used; the server can't list all of its models."""
        with self._lock:
            found: dict[str, dict[str, Any]] = {}
            for name, version in sorted(self._models):
                entry = found.setdefault(name, {"versions": [], "timestamps": []})
                entry["versions"].append(version)
                entry["timestamps"].append(0)
            return found

    def loaded(self) -> list[TensorFlowModel[ServedModel]]:
        """Return the models that have been used."""
        with self._lock:
            return list(self._models.values())

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _open(self, request: LoadRequest) -> ServedModel:
        version = None if request.version == LATEST else request.version
        try:
            metadata = self._channel.call("GetModelMetadata", metadata_request(request.model, version))
        except grpc.RpcError as error:
            raise_call_error(error, self._channel.target, request)
        return ServedModel(self._channel, request.model, version, request, metadata)

    def _find(self, name: str | None) -> tuple[str, str | None]:
        """Return the server's name of a model and its signature key. Raises: ModelError."""
        source = self._source
        if source.form == "path":
            return source.paths[0].url.rstrip("/").rpartition("/")[2], source.paths[0].signature_key
        names = [path.name for path in source.paths]
        if name is None:
            choose = f", choose one of the following: {format_names(sorted(names))}" if names else ""
            raise ModelError(f"model_name was not specified{choose}")
        if not isinstance(name, str):
            raise ModelError(f"model_name must be str, not {type(name).__name__}")
        if source.form == "dir":
            return name, source.signature_key
        for path in source.paths:
            if path.name == name:
                return name, path.signature_key
        raise ModelError(f"'{name}' model wasn't found in the list of available models: {format_names(sorted(names))}")


def raise_call_error(error: Any, target: str, request: LoadRequest) -> NoReturn:
    """Raise a ModelError for a failed call, with the message of the server."""
    code, details = error.code(), clean_message(error.details())
    server = f"TensorFlow Serving at {target}"
    if code is grpc.StatusCode.UNAVAILABLE:
        raise UnreachableError(f"{server} can't be reached: {details}") from None
    if code is grpc.StatusCode.NOT_FOUND:
        if request.version == LATEST or request.model == DEFAULT_MODEL:
            message = f"'{request.model}' model wasn't found in the list of available models of {server}: {details}"
        else:
            message = f"model {request.model} of version {request.version} wasn't found on {server}: {details}"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"{server} did not respond to a call of {request.label} within {CALL_TIMEOUT_S:.0f} s"
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        message = f"{server} has no resources for a request to {request.label}: {details}"
    elif code is grpc.StatusCode.INVALID_ARGUMENT:
        raise ModelInputError(f"{request.label} failed: {details}") from None
    else:
        message = f"{server} failed to run {request.label}: {code.name}: {details}"
    raise ModelError(message) from None
