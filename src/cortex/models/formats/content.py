"""Recognize the format of a model in one file by its bytes, never by its name. Nothing is loaded or executed.

Each recognizer returns what the file is, or None if it is something else. Formats that cortex can't run are recognized
too, so that the error says what to do instead.
"""

from __future__ import annotations

import codecs
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from cortex.errors import ModelFormatError, format_size
from cortex.models.formats import onnx_file, pickles, protobuf
from cortex.models.formats.requirements import SKOPS, ModelRequirement, saved_by, saved_by_older

ModelFormat = Literal["onnx", "tensorflow", "mlflow", "skops", "pickle", "xgboost", "lightgbm"]

#: What cortex loads, for messages.
ACCEPTED = (
    "ONNX, a SavedModel folder, skops, XGBoost (JSON or UBJ), LightGBM (text), an MLflow folder, "
    "and with `trust: pickle` joblib and pickle"
)

_HEAD_BYTES = 64 * 1024
_TAIL_BYTES = 256
_MAX_SCHEMA_BYTES = 64 * 1024**2
_SCHEMA_START_BYTES = 1024  #: and of its end
_MAX_DIRECTORY_BYTES = 4 * 1024**2
_MAX_ARCHIVE_END_BYTES = 66 * 1024  #: the comment of an archive has at most 64 KiB
#: An archive is refused if it grows to more than this size, and by more than this factor.
_MAX_UNPACKED_BYTES = 1024**3
_MAX_RATIO = 200
_SPACE = rb"[ \t\r\n]*"
_XGBOOST_JSON = re.compile(rb"\{" + _SPACE + rb'"(learner|version)"' + _SPACE + rb":")
_XGBOOST_UBJ = re.compile(rb"\{(\[?#?)?[Lli]\0*\x07(learner|version)|\{[iUIlL]\x07(learner|version)")
_JSON_VERSION = re.compile(rb'"version"' + _SPACE + rb":" + _SPACE + rb"\[([0-9, \t\r\n]{5,40})\]")
#: In UBJ, a version is an array of three numbers, each with a marker of its type, or with one marker for all.
_UBJ_VERSION = re.compile(rb"version\[(?:\$(.))?#(?:L.{7}|l.{3}|I.|[iU])\x03(.{3,27})", re.DOTALL)
_UBJ_SIZES = {b"i": 1, b"U": 1, b"I": 2, b"l": 4, b"L": 8}
_LIGHTGBM = re.compile(rb"tree\r?\nversion=(v\d+)\r?\n")


@dataclass(frozen=True, slots=True)
class ModelContent:
    """The content of one file, or of the folder of an MLflow model."""

    format: ModelFormat
    description: str  #: "an ONNX model: a protobuf message with a graph"
    code: str = ""  #: why loading it runs code from the file; "": it does not
    requirements: tuple[ModelRequirement, ...] = ()
    data_files: tuple[str, ...] = ()  #: in the same folder, which belong to it
    needs_code: str = ""  #: why no request without code around it can call it


class UnknownContentError(ModelFormatError):
    """The content of a file is no known format of models."""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    stream: BinaryIO
    size: int
    head: bytes
    tail: bytes

    def damaged(self, why: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path} {why}; copy or save it again")

    def refused(self, what: str, instead: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path} is {what}; {instead}")


def recognize(path: Path) -> ModelContent:
    """Return what a file is.

    Raises: OSError, UnknownContentError, and ModelFormatError for a format that cortex can't run, or a damaged file.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
        stream.seek(max(0, size - _TAIL_BYTES))
        file = _File(path, stream, size, head, stream.read(_TAIL_BYTES))
        for recognizer in _RECOGNIZERS:
            if content := recognizer(file):
                return content
    raise UnknownContentError(
        f"{path} is not a model that cortex knows: it {_describe_bytes(head)}; accepted: {ACCEPTED}"
    )


def _git_lfs_pointer(file: _File) -> None:
    if file.head.startswith(b"version https://git-lfs"):
        raise file.refused("a pointer of Git LFS, not the model itself", "run `git lfs pull`")


# Archives.


def _archive(file: _File) -> ModelContent | None:
    if not file.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return None
    _check_directory_size(file)
    try:
        with zipfile.ZipFile(file.stream) as archive:
            return _archive_content(file, archive)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, RuntimeError) as exc:
        raise file.damaged(f"is a truncated or damaged ZIP archive ({exc})") from None


def _check_directory_size(file: _File) -> None:
    """Raise if the list of an archive's files would take much memory; ZIP64's own records are in the tail."""
    file.stream.seek(max(0, file.size - _MAX_ARCHIVE_END_BYTES))
    tail = file.stream.read()
    end, record = tail.rfind(b"PK\x05\x06"), tail.rfind(b"PK\x06\x06")
    size = int.from_bytes(tail[end + 12 : end + 16], "little") if end >= 0 else 0
    if size == 0xFFFF_FFFF and record >= 0:
        size = int.from_bytes(tail[record + 40 : record + 48], "little")
    if size > _MAX_DIRECTORY_BYTES:
        raise file.damaged(f"is a ZIP archive whose list of files has {format_size(size)}: no model has so many")


def _archive_content(file: _File, archive: zipfile.ZipFile) -> ModelContent:
    infos = archive.infolist()
    names = {info.filename for info in infos}
    ends = {name.rpartition("/")[2] for name in names}
    if "data.pkl" in ends:
        what = "a TorchScript module" if "constants.pkl" in ends else "a PyTorch checkpoint, which is a pickle"
        raise file.refused(what, "export the model to ONNX with torch.onnx.export(), or write a class that loads it")
    if "model.weights.h5" in ends:
        raise file.refused("a Keras archive", "write a SavedModel with model.export(folder), and give that folder")
    if "MLmodel" in ends or "saved_model.pb" in ends:
        what = "an MLflow model" if "MLmodel" in ends else "a SavedModel"
        raise file.refused(f"{what} in a ZIP archive", "unpack it, and give the folder")
    if "schema.json" not in names:
        raise UnknownContentError(
            f"{file.path} is a ZIP archive without a model that cortex knows; accepted: {ACCEPTED}"
        )
    unpacked = sum(info.file_size for info in infos)
    if unpacked > _MAX_UNPACKED_BYTES and unpacked > _MAX_RATIO * file.size:
        raise file.damaged(f"is a ZIP bomb: {format_size(file.size)} that grow to {format_size(unpacked)}")
    return _skops(file, archive)


def _skops(file: _File, archive: zipfile.ZipFile) -> ModelContent:
    if archive.getinfo("schema.json").file_size > _MAX_SCHEMA_BYTES:
        raise file.damaged(f"has a schema.json of more than {format_size(_MAX_SCHEMA_BYTES)}")
    schema = archive.read("schema.json")
    kind = _class_of(schema[:_SCHEMA_START_BYTES])
    if not kind or b'"_skops_version"' not in schema[-_SCHEMA_START_BYTES:]:
        raise UnknownContentError(f"{file.path} is a ZIP archive with a schema.json that skops did not write")
    found = re.search(rb'"_sklearn_version"\s*:\s*\{[^{}]*?"content"\s*:\s*"\\"([0-9a-z.+]{1,40})\\""', schema)
    requirements = [SKOPS]
    if version := found and found[1].decode():
        requirements.insert(0, saved_by("scikit-learn", version))
    description = f"a skops file: a ZIP archive whose schema.json describes a {kind}"
    return ModelContent("skops", description, requirements=tuple(requirements))


def _class_of(schema: bytes) -> str:
    """Return the module and the class at the start of a schema; "" without them."""
    names = []
    for key in (b"__module__", b"__class__"):
        found = re.search(rb'"%s"\s*:\s*"([A-Za-z0-9_.]{1,60})"' % key, schema)
        names.append(found[1].decode() if found else "")
    return ".".join(names) if all(names) else ""


# Trees.


def _xgboost(file: _File) -> ModelContent | None:
    if file.head.startswith((b"binf", b"bs64")):
        raise file.refused("an XGBoost model in the old binary format", 'save it with save_model("model.ubj")')
    if _XGBOOST_JSON.match(file.head):
        # The version is the last key, or the first one if something else has sorted them.
        found = _JSON_VERSION.search(file.tail) or _JSON_VERSION.search(file.head)
        version = ".".join(part.strip() for part in found[1].decode().split(",")) if found else ""
        if not file.tail.rstrip().endswith(b"}"):
            raise file.damaged("is a truncated XGBoost model: its JSON has no end")
        kind = "JSON"
    elif _XGBOOST_UBJ.match(file.head):
        version = _ubj_version(file.tail) or _ubj_version(file.head)
        if not file.tail.endswith(b"}"):
            raise file.damaged("is a truncated XGBoost model: its UBJ has no end")
        kind = "UBJ"
    else:
        return None
    stated = f", saved by XGBoost {version}" if version else ""
    description = f'an XGBoost model: {kind} with the key "learner"{stated}'
    return ModelContent("xgboost", description, requirements=(saved_by_older("xgboost", version, "XGBoost"),))


def _ubj_version(data: bytes) -> str:
    found = _UBJ_VERSION.search(data)
    if not found:
        return ""
    rest, numbers = found[2], []
    for _ in range(3):
        marker, rest = (found[1], rest) if found[1] else (rest[:1], rest[1:])
        size = _UBJ_SIZES.get(marker, 0)
        if not size or len(rest) < size:
            return ""
        numbers.append(int.from_bytes(rest[:size], "big"))
        rest = rest[size:]
    return ".".join(map(str, numbers))


def _lightgbm(file: _File) -> ModelContent | None:
    found = _LIGHTGBM.match(file.head)
    if not found:
        return None
    file.stream.seek(max(0, file.size - 1024**2))
    if b"end of trees" not in file.stream.read(1024**2):
        raise file.damaged("is a truncated LightGBM model: it has no line `end of trees`")
    description = f"a LightGBM model: text with the lines `tree` and `version={found[1].decode()}`"
    return ModelContent("lightgbm", description, requirements=(ModelRequirement("lightgbm", "lightgbm"),))


# Pickles.


def _pickle(file: _File) -> ModelContent | None:
    code = "loading a pickle runs any code that its author put into it"
    if file.head.startswith(b"\x04\x22\x4d\x18"):
        needed = tuple(ModelRequirement(package, package) for package in ("joblib", "lz4"))
        return ModelContent("pickle", "a file compressed with LZ4, in which joblib stores a pickle", code, needed)
    file.stream.seek(0)
    found = pickles.inspect(file.stream, file.size)
    if found is None:
        return None
    if found.is_torch:
        raise file.refused(
            "a PyTorch checkpoint, which is a pickle",
            "export the model to ONNX with torch.onnx.export(), or write a class that loads it",
        )
    packed = f" compressed with {found.compression}" if found.compression else ""
    named = f"; it names {', '.join(found.shown_classes)}" if found.classes else ""
    requirements = [ModelRequirement(package, package) for package in found.packages]
    if found.sklearn_version:
        requirements = [each for each in requirements if each.package != "scikit-learn"]
        requirements.insert(0, saved_by("scikit-learn", found.sklearn_version))
    description = f"a pickle (protocol {found.protocol}){packed}{named}"
    return ModelContent("pickle", description, code, tuple(requirements))


# Protobuf.


def _onnx(file: _File) -> ModelContent | None:
    try:
        header = onnx_file.read_header(file.stream, file.size)
    except protobuf.MessageError as exc:
        # `ir_version` comes first in every ONNX file.
        if file.head[:1] == b"\x08" and b"\x12" in file.head[:4]:
            raise file.damaged(f"is a truncated or damaged ONNX file ({exc})") from None
        return None
    if header is None:
        return None
    try:
        data_files = onnx_file.check_external_data(file.stream, file.size, file.path)
        needs_code = onnx_file.why_code_is_needed(file.stream, file.size)
    except protobuf.MessageError as exc:
        raise file.damaged(f"is a truncated or damaged ONNX file ({exc})") from None
    description = f"an ONNX model: a protobuf message with a graph, {header.describe()}"
    return ModelContent("onnx", description, "", (header.requirement(),), data_files, needs_code)


# Formats that cortex can't run.


def _safetensors(file: _File) -> None:
    length = int.from_bytes(file.head[:8], "little")
    if file.head[8:10] == b'{"' and 2 <= length <= file.size - 8:
        raise file.refused(
            "a safetensors file: it has weights, but not the model that uses them",
            "export the model to ONNX, or write a class that constructs it and loads the weights",
        )


#: First bytes → what it is, and what to do instead.
_REFUSED = {
    b"CBM1": ("a CatBoost model", 'save it as ONNX: model.save_model("model.onnx", format="onnx")'),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file, as of Keras", "write a SavedModel with model.export(folder), and give that"),
    b"GGUF": ("a GGUF file, of llama.cpp", "write a class that runs it"),
    b"\x93NUMPY": ("a numpy array", "save the model that uses it"),
    b"PAR1": ("a Parquet table", "give the file of a model"),
}


def _refused(file: _File) -> None:
    for magic, (what, instead) in _REFUSED.items():
        if file.head.startswith(magic):
            raise file.refused(what, instead)
    if file.head[4:8] == b"TFL3":
        raise file.refused("a TensorFlow Lite model", "give the SavedModel that it was converted from")
    if file.head[4:8] == b"ORTM":
        raise file.refused("a model in ONNX Runtime's own format", "give the ONNX file that it was converted from")


def _saved_model_file(file: _File) -> None:
    if file.path.name == "saved_model.pb":
        raise file.refused("a part of a SavedModel", "give its folder")


_RECOGNIZERS: tuple[Callable[[_File], ModelContent | None], ...] = (
    _git_lfs_pointer,
    _saved_model_file,
    _archive,
    _safetensors,
    _refused,
    _xgboost,
    _lightgbm,
    _pickle,
    _onnx,
)


def _describe_bytes(head: bytes) -> str:
    """Return the kind of a file's content, and nothing of the content: others may see the message."""
    if not head:
        return "is empty"
    return "is binary" if b"\0" in head or not _is_text(head) else "is text"


def _is_text(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut off
    except UnicodeDecodeError:
        return False
    return True
