"""TensorFlow Serving's messages, as far as we send or read them, and tensors in them. It does no I/O.

The names and numbers below are facts of the wire. The classes are made from them in a pool of descriptors that nobody
else sees: TensorFlow and the official stubs register files of the same names, and one process may hold both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from cortex.predictor.clients.servable import SignatureInfo, read_signature
from cortex.predictor.clients.tensors import DTYPES, Array

#: Package → message → fields as "number name type"; `*` marks repeated ones, `map:` maps from strings. Enumerations
#: are integers on the wire and here.
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
#: Service → method → its request and response.
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
#: States of a version, `ModelVersionStatus.State`.
AVAILABLE, END = 30, 50

_SIGNATURES = "signature_def"  #: the metadata that we ask for
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("int32", "int64", "uint32", "uint64", "float", "double", "bool", "string", "bytes")
}
#: Where a tensor's values are that are not in `tensor_content`, by the type's number.
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


#: Message classes by their names without the package.
MESSAGES: Mapping[str, Any] = _make_classes()


def model_spec(name: str, version: str | None, signature: str = "") -> Any:
    """Name a model; without a version the server chooses its latest."""
    number = None if version is None else MESSAGES["Int64Value"](value=int(version))
    return MESSAGES["ModelSpec"](name=name, version=number, signature_name=signature)


def metadata_request(name: str, version: str | None) -> Any:
    """Ask for the signatures of a model."""
    return MESSAGES["GetModelMetadataRequest"](model_spec=model_spec(name, version), metadata_field=[_SIGNATURES])


def predict_request(name: str, version: str | None, signature: str, inputs: Mapping[str, Array], specs: Any) -> Any:
    """Ask for a run of a signature; `specs` are its inputs."""
    request = MESSAGES["PredictRequest"](model_spec=model_spec(name, version, signature))
    for key, array in inputs.items():
        write_tensor(request.inputs[key], array, specs[key].dtype)
    return request


def config_request(folders: Mapping[str, str]) -> Any:
    """Ask a server to serve just these: name → the folder with its numbered versions."""
    request = MESSAGES["ReloadConfigRequest"]()
    request.config.model_config_list.SetInParent()
    for name, folder in folders.items():
        request.config.model_config_list.config.add(name=name, base_path=folder, model_platform="tensorflow")
    return request


def read_signatures(response: Any) -> dict[str, SignatureInfo]:
    """Read what a server says of a model's signatures. Raises: KeyError, google.protobuf.message.DecodeError."""
    packed = response.metadata.get(_SIGNATURES)
    if packed is None or packed.type_url.rpartition("/")[2] != "tensorflow.serving.SignatureDefMap":
        raise KeyError(_SIGNATURES)
    found = MESSAGES["SignatureDefMap"].FromString(packed.value).signature_def
    return {key: read_signature(found[key]) for key in sorted(found)}


def write_tensor(tensor: Any, array: Array, dtype: int) -> None:
    """Fill a `TensorProto`; numbers as the bytes of memory, the cheapest form that servers accept."""
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
    """Read a `TensorProto` in any of its forms. Raises: ValueError if it is none that we know, or malformed."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"a tensor has type {tensor.dtype}, which can't be read")
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    if tensor.tensor_content and dtype.number != _STRING:
        raw = np.uint16 if dtype.number == _BFLOAT16 else dtype.numpy.newbyteorder("<")
        flat: Array = np.frombuffer(tensor.tensor_content, raw)
        flat = _from_bfloat16(flat) if dtype.number == _BFLOAT16 else flat
    else:
        flat = _read_values(getattr(tensor, _VALUE_FIELDS[dtype.number])[:], dtype.number)
    if len(flat) < count:
        # A tensor whose values end alike may be cut short: the last one stands for the rest, or zero if there is none.
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
    """Round floats to their upper 16 bits, halves to even, as TensorFlow does."""
    bits = np.ascontiguousarray(array, "<f4").view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding up could carry a NaN's bits away.
    return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype("<u2")


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
