"""The header of an ONNX file, and a check of the files that it refers to. Nothing is loaded.

Field numbers are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    names = set()
    for each in fields(stream, 0, size):
        if not each.is_bytes or _TREE["model"].get(each.number) != "graph":
            continue
        for value in fields(stream, each.start, each.end):
            if value.is_bytes and value.number in (11, 12) and not _has_shape(stream, value):
                names |= {text(stream, name) for name in fields(stream, value.start, value.end) if name.number == 1}
    return names


def _has_shape(stream: BinaryIO, value: Field) -> bool:
    """Return whether a `ValueInfoProto` has a field `type.tensor_type.shape`."""
    waiting: list[tuple[Field, tuple[int, ...]]] = [(value, (2, 1, 2))]
    while waiting:
        message, path = waiting.pop()
        if not path:
            return True
        waiting += [
            (each, path[1:])
            for each in fields(stream, message.start, message.end)
            if each.is_bytes and each.number == path[0]
        ]
    return False


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
