"""The header of an ONNX file, and a check of the files that it refers to. Nothing is loaded.

Field numbers are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from cortex.errors import ModelFormatError
from cortex.models.formats.protobuf import Field, MessageError, fields, text
from cortex.models.formats.requirements import ModelRequirement

_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _OPSET = 1, 2, 3, 8
_MAX_IR = 1000
#: Message type → its fields that hold further messages with tensors, and their types.
_TREE = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "function": {7: "node", 11: "attribute"},
}
_EXTERNAL_DATA = 13  #: of a tensor
_MEMORY = "_ORT_MEM_ADDR_"  #: in a place that is an address in memory, for ONNX Runtime's own use
_MAX_DEPTH = 50
_MAX_FIELDS = 10_000_000  #: of all graphs together
_INPUT, _OUTPUT = 11, 12  #: of a graph
_INITIALIZERS = {5: (8,), 15: (1, 8)}  #: of a graph, sparse ones too → where their names are
#: Numbers of element types in files → ONNX Runtime's names.
_ELEMENTS = dict(
    enumerate(
        (
            *("undefined", "float", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16"),
            *("double", "uint32", "uint64", "complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz"),
            *("float8e5m2", "float8e5m2fnuz", "uint4", "int4"),
        )
    )
)
#: ONNX Runtime's names of the types of inputs and outputs that have a JSON form, and that of the protocol V2.
DATATYPES: Mapping[str, str] = {
    "tensor(bool)": "BOOL",
    **{f"tensor(int{bits})": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"tensor(uint{bits})": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
#: Outputs of classifiers: for each row, the probability of each class.
MAPS = frozenset({"seq(map(int64,tensor(float)))", "seq(map(string,tensor(float)))"})
#: The operator sets that releases of ONNX Runtime brought, see its page "Compatibility".
_RUNTIMES = {21: "1.18", 20: "1.17", 19: "1.15", 18: "1.14", 17: "1.12", 16: "1.11", 15: "1.10"}


@dataclass(frozen=True, slots=True)
class OnnxHeader:
    """The header of an ONNX file: versions and producer."""

    ir_version: int
    opset: int  #: of the domain ai.onnx; 0 if it is not used
    producer: str

    def describe(self) -> str:
        """Return its versions, and who made it, for messages."""
        producer = f", made by {self.producer}" if self.producer else ""
        return f"opset {self.opset}, IR version {self.ir_version}{producer}"

    def requirement(self) -> ModelRequirement:
        """Return the oldest ONNX Runtime that knows its operator set."""
        wanted = next((opset for opset in sorted(_RUNTIMES) if opset >= self.opset), max(_RUNTIMES))
        release = _RUNTIMES[wanted]
        return ModelRequirement(
            "onnxruntime", f"onnxruntime>={release}", f">={release}", f"it uses ONNX opset {self.opset}"
        )


def read_header(stream: BinaryIO, size: int) -> OnnxHeader | None:
    """Read the header of a `ModelProto`; None for a protobuf message of another kind. Raises: MessageError."""
    ir_version, opset = 0, 0
    names = {_PRODUCER: "", _PRODUCER_VERSION: ""}
    has_graph = False
    for field in fields(stream, 0, size):
        if field.number == _IR_VERSION and not field.is_bytes:
            ir_version = field.value
        elif field.number in names:
            names[field.number] = text(stream, field)
        elif field.is_bytes and _TREE["model"].get(field.number) == "graph":
            has_graph = True
        elif field.number == _OPSET and field.is_bytes:
            opset = _opset(stream, field) or opset
    if not 0 < ir_version < _MAX_IR or not has_graph:
        return None
    producer = " ".join(name for name in names.values() if name)
    return OnnxHeader(ir_version, opset, producer)


def check_external_data(stream: BinaryIO, size: int, path: Path) -> tuple[str, ...]:
    """Return the files of tensors, which must be in the folder. Raises: ModelFormatError, MessageError."""
    folder = path.resolve().parent
    locations = sorted(external_files(stream, size))
    for location in locations:
        place = PurePosixPath(location)
        inside = not place.is_absolute() and not {"..", _MEMORY} & set(place.parts)
        if not inside or not (folder / place).resolve().is_relative_to(folder):
            raise ModelFormatError(
                f"{path} refers to data outside of its folder ({location}); export it again with the data next to it"
            )
        if not (folder / place).is_file():
            raise ModelFormatError(f"{path} refers to data in {location}, which is not there; copy that file too")
    return tuple(locations)


def external_files(stream: BinaryIO, size: int) -> set[str]:
    """Return the names of the files that hold tensors of the model. Raises: MessageError.

    A field that is there several times is read each time: parsers merge them.
    """
    locations: set[str] = set()
    count = 0
    waiting = [(Field(0, start=0, end=size), "model", 0)]
    while waiting:
        message, kind, depth = waiting.pop()
        if depth > _MAX_DEPTH or count > _MAX_FIELDS:
            raise MessageError("too large or too deeply nested graphs")
        if kind == "tensor":
            locations.update(_locations(stream, message))
            continue
        for field in fields(stream, message.start, message.end):
            count += 1
            if field.is_bytes and (inner := _TREE[kind].get(field.number)):
                waiting.append((field, inner, depth + 1))
    return locations


def unranked(stream: BinaryIO, size: int) -> set[str]:
    """Return the inputs and outputs of a graph whose number of axes is open. Raises: MessageError.

    ONNX Runtime describes them as scalars.
    """
    return {
        text(stream, name)
        for value in _in_graph(stream, size)
        if value.number in (_INPUT, _OUTPUT) and not any(_at(stream, value, (2, 1, 2)))  # type.tensor_type.shape
        for name in _at(stream, value, (1,))
    }


def why_code_is_needed(stream: BinaryIO, size: int) -> str:
    """Return why no request can run the model without code around it; "" if one can. Raises: MessageError."""
    names: set[str] = set()
    values: dict[int, list[tuple[str, str]]] = {_INPUT: [], _OUTPUT: []}
    for each in _in_graph(stream, size):
        if each.number in _INITIALIZERS:
            names |= {text(stream, name) for name in _at(stream, each, _INITIALIZERS[each.number])}
        elif each.number in values:
            name = "".join(text(stream, name) for name in _at(stream, each, (1,)))
            values[each.number].append((name, "".join(_type(stream, found) for found in _at(stream, each, (2,)))))
    return unusable_value([each for each in values[_INPUT] if each[0] not in names], values[_OUTPUT])


def unusable_value(inputs: Iterable[tuple[str, str]], outputs: Iterable[tuple[str, str]]) -> str:
    """Return the first input or output that makes a model unusable without code, and what to do; "" without one.

    Each is a name with a type; an output has an empty one if only ONNX Runtime can tell.
    """
    needed, wrong = [*inputs], list[tuple[str, str, str]]()
    has_tensor = any(type_ in DATATYPES for _, type_ in needed)  # beside it, others may be left out
    for name, type_ in needed:
        if type_ not in DATATYPES and not (has_tensor and type_.startswith("optional(")):
            wrong.append(("input", name, type_))
    returned = [*outputs]
    if returned and not any(not type_ or type_ in DATATYPES or type_ in MAPS for _, type_ in returned):
        wrong.append(("output", *returned[0]))
    for side, name, type_ in wrong:
        return (
            f"has the {side} {name!r} of the type {type_}, which APIs without code can't have; write a class with "
            "`type: onnx`, whose onnx_client passes it on"
        )
    return ""


def _in_graph(stream: BinaryIO, size: int) -> Iterator[Field]:
    """Yield the messages in the graph of a model. Raises: MessageError."""
    for each in fields(stream, 0, size):
        if each.is_bytes and _TREE["model"].get(each.number) == "graph":
            yield from (field for field in fields(stream, each.start, each.end) if field.is_bytes)


def _at(stream: BinaryIO, message: Field, path: Sequence[int]) -> Iterator[Field]:
    """Yield the messages and texts at a path of field numbers."""
    for each in fields(stream, message.start, message.end):
        if each.is_bytes and each.number == path[0]:
            yield from _at(stream, each, path[1:]) if path[1:] else (each,)


def _type(stream: BinaryIO, message: Field, depth: int = 0) -> str:
    """Return ONNX Runtime's name of a `TypeProto`, such as `seq(tensor(float))`. Raises: MessageError."""
    if depth > _MAX_DEPTH:
        raise MessageError("a too deeply nested type")
    for kind in fields(stream, message.start, message.end):
        if not kind.is_bytes:
            continue
        parts = list(fields(stream, kind.start, kind.end))
        of = ",".join(
            _type(stream, each, depth + 1) if each.is_bytes else _ELEMENTS.get(each.value, f"type {each.value}")
            for each in parts
            if each.number == 1 or kind.number == 5  # the type of elements; of a map, those of keys and values
        )
        names = {1: "tensor", 4: "seq", 5: "map", 8: "sparse_tensor", 9: "optional"}
        if kind.number in names:
            return f"{names[kind.number]}({of})"
    return ""


def _locations(stream: BinaryIO, tensor: Field) -> Iterator[str]:
    for field in fields(stream, tensor.start, tensor.end):
        if field.number != _EXTERNAL_DATA or not field.is_bytes:
            continue
        entry = {each.number: text(stream, each) for each in fields(stream, field.start, field.end) if each.is_bytes}
        if entry.get(1) == "location":
            yield entry.get(2, "")


def _opset(stream: BinaryIO, field: Field) -> int:
    domain, version = "", 0
    for each in fields(stream, field.start, field.end):
        if each.number == 1 and each.is_bytes:
            domain = text(stream, each)
        elif each.number == 2 and not each.is_bytes:
            version = each.value
    return version if domain in ("", "ai.onnx") else 0
