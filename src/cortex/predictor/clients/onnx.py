"""ONNX models: sessions, conversion of inputs, and the `onnx_client`.

This is the only module that imports onnxruntime; it is imported for `type: onnx` only.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime

from cortex.errors import ModelError, ModelFormatError, ModelInputError, with_article
from cortex.models.formats.detection import describe_format
from cortex.models.formats.onnx_file import DATATYPES, MAPS, check_external_data, unranked, unusable_value
from cortex.models.formats.protobuf import MessageError
from cortex.models.loaded_models import ensure_call_scope
from cortex.models.loader import LoadRequest
from cortex.models.registry import Registry
from cortex.payloads.arrays import Array, TensorError
from cortex.payloads.signature import ModelSignature, TensorSignature
from cortex.predictor.clients.tensors import TensorSpec, to_array
from cortex.predictor.estimators.estimator import library_message

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
#: The parts of an error message before its text: prefix, number and name.
_PREFIX_PARTS = 3
_FATAL = 4
#: Errors of ONNX Runtime for files that are truncated, empty or in another format.
_NOT_ONNX = {"Protobuf parsing failed", "No graph was found in the protobuf"}
#: Errors for files that are newer than the installed ONNX Runtime → the version of the file, and the supported one.
_TOO_NEW = (
    (
        "opset",
        re.compile(r"Opset (\d+) is under development.*official support for domain ai\.onnx is till opset (\d+)"),
    ),
    ("IR version", re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")),
)


_STRING = "tensor(string)"
#: ONNX Runtime's name of a type → numpy's name, and the number in `tensors`. Values of other types are passed on
#: unchanged: sequences, maps, and types that numpy does not have.
_TYPES: Mapping[str, tuple[str, int]] = {
    "tensor(float)": ("float32", 1),
    "tensor(double)": ("float64", 2),
    "tensor(int32)": ("int32", 3),
    "tensor(uint8)": ("uint8", 4),
    "tensor(int16)": ("int16", 5),
    "tensor(int8)": ("int8", 6),
    "tensor(complex64)": ("complex64", 8),
    "tensor(int64)": ("int64", 9),
    "tensor(bool)": ("bool", 10),
    "tensor(uint16)": ("uint16", 17),
    "tensor(complex128)": ("complex128", 18),
    "tensor(float16)": ("float16", 19),
    "tensor(uint32)": ("uint32", 22),
    "tensor(uint64)": ("uint64", 23),
    _STRING: ("string", 7),
}

#: Common types of values that are not mappings; isinstance(value, Mapping) is slower than converting a row.
_NEVER_NAMED = frozenset({np.ndarray, list, tuple, float, int, str, bytes})

_LISTS = frozenset({list, tuple})


class OnnxModel:
    """A loaded model."""

    def __init__(
        self, request: LoadRequest, session: onnxruntime.InferenceSession, unranked: Collection[str] = ()
    ) -> None:
        """`unranked` are the inputs and outputs whose number of axes is open; the session has them as scalars."""
        self.request = request
        self._unranked = unranked
        self.session = session
        self.inputs = OnnxInputs(session.get_inputs(), session.get_overridable_initializers(), request.label)
        self._classes: dict[str, tuple[str, ...]] = {}  #: of outputs that are maps by class

    @property
    def input_signatures(self) -> dict[str, dict[str, Any]]:
        """Return the shape and type of each input; unspecified sizes are names or None."""
        return {given.name: {"shape": given.declared_shape, "type": given.type} for given in self.inputs.all}

    @cached_property
    def signature(self) -> ModelSignature:
        """Return the inputs and outputs that are tensors, or become tensors: `tensor_of` lists the others."""
        outputs = []
        for output in self.session.get_outputs():
            labels = self._classes.get(output.name, ())
            if output.type in DATATYPES:
                outputs.append(self._tensor(output, is_optional=False))
            elif output.type in MAPS:
                outputs.append(TensorSignature(output.name, "FP32", (-1, len(labels) or -1), labels=labels))
        optional = {each.name for each in self.session.get_overridable_initializers()}
        inputs = [
            self._tensor(each, is_optional=each.name in optional)
            for each in (*self.session.get_inputs(), *self.session.get_overridable_initializers())
            if each.type in DATATYPES
        ]
        name, reason = self.request.model, describe_format(self.request.path)
        return ModelSignature(name, "onnxruntime_onnx", tuple(inputs), tuple(outputs), reason)

    def _tensor(self, arg: NodeArg, *, is_optional: bool) -> TensorSignature:
        is_open = not arg.shape and arg.name in self._unranked
        shape = (-1,) if is_open else tuple(size if isinstance(size, int) and size >= 0 else -1 for size in arg.shape)
        return TensorSignature(arg.name, DATATYPES[arg.type], shape, optional=is_optional, any_shape=is_open)

    def check_types(self) -> None:
        """Check that requests without code can run the model. Raises: ModelFormatError."""
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        if reason := unusable_value([(each.name, each.type) for each in inputs], [(o.name, o.type) for o in outputs]):
            raise ModelFormatError(f"{self.request.label} {reason}")

    def infer(self, inputs: Mapping[str, Any], outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Run the model on arrays by name. Raises: ModelInputError."""
        wanted = [each for each in self.signature.outputs if not outputs or each.name in outputs]
        values = self._run(inputs, [each.name for each in wanted])
        return {each.name: tensor_of(value, len(each.labels)) for each, value in zip(wanted, values, strict=True)}

    @property
    def handler_signatures(self) -> tuple[Any, Any]:
        """Return the `signature` of request handlers: of their first and of their second function."""
        return self.session.get_inputs(), self.session.get_outputs()

    def predict(self, model_input: Any) -> list[Any]:
        """Run the model and return its outputs like `session.run`. Raises: ModelInputError."""
        return self._run(model_input, None)

    def _run(self, model_input: Any, outputs: Sequence[str] | None) -> list[Any]:
        feed = self.inputs.feed(model_input)
        try:
            return self.session.run(outputs, feed)  # type: ignore[no-any-return]
        except Exception as exc:  # errors of ONNX Runtime have no common base class
            raise ModelInputError(f"{self.request.label} can't be run on this input: {_error_text(exc)}") from exc

    def warm_up(self) -> None:
        """Run the model once on zeros, so that the first request need not wait for lazy initialization."""
        zeros = {given.name: given.zeros() for given in self.inputs.all if given.is_required}
        if any(value is None for value in zeros.values()):
            return
        quiet = onnxruntime.RunOptions()
        quiet.log_severity_level = _FATAL
        with contextlib.suppress(Exception):  # a model may reject zeros
            outputs = self.session.run(None, zeros, quiet)
            for output, value in zip(self.session.get_outputs(), outputs, strict=True):
                if output.type in MAPS:
                    self._classes[output.name] = tuple(map(str, value[0]))


class OnnxLoader:
    """The `ModelLoader` of ONNX models."""

    def __init__(self, wants_gpu: bool, threads: int, *, has_code: bool = True) -> None:
        """Without code around them, only models whose inputs and outputs have JSON forms are loaded."""
        self._has_code = has_code
        self._options = _session_options(threads)
        self._providers = choose_providers(wants_gpu, onnxruntime.get_available_providers())
        if wants_gpu and _CUDA not in self._providers:
            _warn(
                "models run on the CPU: the installed onnxruntime has no CUDA; add onnxruntime-gpu to requirements.txt"
            )
        # Weak references: the registry counts strong ones to find models in use.
        self._loaded: WeakValueDictionary[int, OnnxModel] = WeakValueDictionary()
        self._lock = threading.Lock()

    def load(self, request: LoadRequest) -> OnnxModel:
        """Load and warm up the model in `request.path`. Raises: ModelError."""
        file = find_model_file(Path(request.path))
        open_shapes = _check_file(file)
        try:
            session = onnxruntime.InferenceSession(str(file), self._options, providers=self._providers)
        except Exception as exc:  # as in predict
            raise ModelError(_load_error(exc, file)) from exc
        if open_shapes is None:
            raise ModelError(f"{file.name} has parts whose data can't be checked; export it again")
        if _CUDA in self._providers and _CUDA not in session.get_providers():
            _warn(f"{request.label} runs on the CPU: CUDA could not be initialized, see the lines above")
        model = OnnxModel(request, session, open_shapes)
        if not self._has_code:
            model.check_types()
        model.warm_up()
        with self._lock:
            self._loaded[id(model)] = model
        return model

    def unload(self, model: OnnxModel) -> None:
        """Drop the session; its memory is freed when running calls have returned."""
        with self._lock:
            self._loaded.pop(id(model), None)
        del model.session

    def loaded(self) -> list[OnnxModel]:
        """Return the models that are loaded."""
        with self._lock:
            return list(self._loaded.values())


class OnnxClient:
    """The `onnx_client` of the user's constructor: runs ONNX models. Thread-safe."""

    def __init__(self, models: Registry[OnnxModel], loader: OnnxLoader) -> None:
        self._models = models
        self._loader = loader

    def predict(self, model_input: Any, model_name: str | None = None, model_version: str = "latest") -> list[Any]:
        """Run a model on a dictionary of input names to values, or on the value of its only input.

        Values are cast to the types of the inputs, and reshaped where this is unambiguous. Returns the outputs like
        `InferenceSession.run`. Raises: ModelError.
        """
        with ensure_call_scope():
            return self._models.get(model_name, model_version).predict(model_input)

    def get_model(self, model_name: str | None = None, model_version: str = "latest") -> dict[str, Any]:
        """Return the `session` of a model, its inputs as `signatures`, and its `input_signatures`.

        Raises: ModelError.
        """
        model = self._models.get(model_name, model_version)
        return {
            "session": model.session,
            "signatures": model.session.get_inputs(),
            "input_signatures": model.input_signatures,
        }

    def describe(self) -> dict[str, Any]:
        """Return `model_metadata` for a GET: versions, timestamps, and the inputs of the newest loaded version."""
        newest: dict[str, OnnxModel] = {}
        for model in sorted(self._loader.loaded(), key=lambda model: int(model.request.version)):
            newest[model.request.model] = model
        metadata: dict[str, Any] = {}
        for name, entry in self._models.describe().items():
            metadata[name] = {"versions": entry["versions"], "timestamps": entry["timestamps"]}
            if name in newest:
                metadata[name]["input_signatures"] = newest[name].input_signatures
        return metadata


def tensor_of(value: Any, classes: int) -> Array:
    """Return an output as an array; a list of maps by class, as classifiers return them, is a matrix."""
    if isinstance(value, list):
        rows = [list(row.values()) for row in value]
        return np.array(rows, np.float32) if rows else np.empty((0, classes), np.float32)
    return np.asarray(value)


def choose_providers(wants_gpu: bool, available: Sequence[str]) -> list[str]:
    """Return the execution providers of a session, the preferred one first."""
    return [_CUDA, _CPU] if wants_gpu and _CUDA in available else [_CPU]


def find_model_file(path: Path) -> Path:
    """Return the only `*.onnx` file in a folder. Raises: ModelError."""
    if path.is_file():
        return path
    files = sorted(file for file in path.rglob("*.onnx") if file.is_file())
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelError(f"there must be exactly one *.onnx file, but there are {len(files)}: {found}")
    return files[0]


def _check_file(file: Path) -> Collection[str] | None:
    """Check that the data of a model is in its folder, and return `unranked`; None if the file can't be read.

    Raises: ModelFormatError.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(8)[4:] == b"ORTM":  # ONNX Runtime's own format
            return ()
        try:
            check_external_data(stream, size, file)
            return unranked(stream, size)
        except MessageError:
            return None


def _session_options(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Spinning threads would use milliseconds of every processor after each short run.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _error_text(exc: Exception) -> str:
    """Return the text of an error such as `[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : text`."""
    text = library_message(exc)
    return text.split(" : ", _PREFIX_PARTS)[-1] if text.startswith("[ONNXRuntimeError]") else text


def _load_error(exc: Exception, file: Path) -> str:
    """Return why a file can't be loaded, with its name instead of the path to which it was downloaded."""
    text = _error_text(exc)
    for what, pattern in _TOO_NEW:
        if found := pattern.search(text):
            installed = onnxruntime.__version__
            return (
                f"{file.name} has {what} {found[1]}, but onnxruntime {installed} supports at most {found[2]}; write "
                f"onnxruntime>{installed} into requirements.txt, or export the model again with {what} {found[2]}"
            )
    reason = text.removeprefix(f"Load model from {file} failed:").strip().rstrip(".")
    fix = "; is it an ONNX file? export it again" if reason in _NOT_ONNX else ""
    return f"{file.name}: {reason}{fix}"


def _warn(text: str) -> None:
    sys.stderr.write(f"onnx: {text}\n")


class NodeArg(Protocol):
    """ONNX Runtime's description of an input."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> list[int | str | None]: ...


class OnnxInput:
    """One input: its type and shape, and the conversion of values."""

    def __init__(self, arg: NodeArg) -> None:
        plain, number = _TYPES.get(arg.type, (arg.type, 0))
        self.name = arg.name
        self.onnx_type = arg.type
        self.type = plain  #: numpy's name of the type, "string", or ONNX Runtime's where numpy has none
        self.declared_shape = list(arg.shape)  #: names and None are unspecified sizes
        self.is_tensor = number != 0
        self.is_string = arg.type == _STRING
        self.is_required = not arg.type.startswith("optional(")
        #: Empty for a scalar and for any shape: ONNX Runtime does not distinguish them.
        self.shape = tuple(size if isinstance(size, int) and size >= 0 else None for size in arg.shape)
        self._dtype = np.dtype(object if self.is_string else plain) if self.is_tensor else None
        self._spec = TensorSpec(number, None)
        self._rank = len(self.shape)
        self._known = tuple((axis, size) for axis, size in enumerate(self.shape) if size is not None)

    def __str__(self) -> str:
        if not self.is_tensor:
            return self.type
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.type} of shape [{sizes}]" if self.shape else self.type

    def convert(self, value: Any) -> Any:
        """Convert a value for ONNX Runtime; an array of the right type and shape is returned unchanged.

        Raises: TensorError, ValueError.
        """
        if type(value) is np.ndarray and value.dtype == self._dtype and not self.is_string:
            array = value
        elif self._dtype is None or type(value).__name__ == "OrtValue":
            return value
        elif self.is_string:
            array = _to_strings(value)
        else:
            array = self._cast(value)
        return array if self._fits(array) else self._reshape(array)

    def zeros(self) -> Array | None:
        """Return an array of zeros, with 1 for unspecified sizes; None for types other than numbers."""
        if self._dtype is None or self.is_string:
            return None
        return np.zeros([1 if size is None else size for size in self.shape], self._dtype)

    def _cast(self, value: Any) -> Array:
        """Do the same as `to_array`, but the common case, numbers for floats, in a fraction of its time.

        In lists for floats, null is NaN, and a string that contains a number is that number.
        """
        wants_floats = self._dtype is not None and self._dtype.kind == "f"
        if wants_floats and type(value) is np.ndarray and value.dtype.kind in "fiub":
            return value.astype(self._dtype)
        if wants_floats and type(value) in _LISTS:
            with contextlib.suppress(ValueError, TypeError, OverflowError):  # `to_array` reports which value is invalid
                return np.array(value, self._dtype)
        return to_array(value, self._spec)

    def _fits(self, array: Array) -> bool:
        if not self._rank:
            return True
        if array.ndim != self._rank:
            return False
        shape = array.shape
        for axis, size in self._known:  # noqa: SIM110 - runs for every request, and all() takes twice as long
            if shape[axis] != size:
                return False
        return True

    def _reshape(self, array: Array) -> Array:
        """Reshape where it is unambiguous: a flat list, or a row without the batch dimension.

        An array of the right rank with other sizes is rejected: reshaping it would mix up its values.
        """
        shown = f"the value has shape [{', '.join(map(str, array.shape))}]"
        if array.ndim == self._rank and sum(size != 1 for size in array.shape) > 1:
            raise TensorError(shown)
        if self._rank == array.ndim + 1 and self.shape[0] is None:
            lifted = array.reshape((1, *array.shape))
            if self._fits(lifted):
                return lifted
        is_open = len(self._known) < self._rank - 1
        try:  # if several sizes are open, they are 1
            return array.reshape([(1 if is_open else -1) if size is None else size for size in self.shape])
        except ValueError:
            raise TensorError(shown if array.ndim else "the value is a scalar") from None


class OnnxInputs:
    """All inputs of one model."""

    def __init__(self, args: Sequence[NodeArg], overridable: Sequence[NodeArg], model: str) -> None:
        """Prepare the inputs; those in `overridable` have defaults, and `model` is the label in messages."""
        self.all = tuple(OnnxInput(arg) for arg in args)
        self._only = self.all[0] if len(self.all) == 1 else None
        self._optional = {arg.name: OnnxInput(arg) for arg in overridable}
        self._by_name = {given.name: given for given in self.all}
        self._model = model

    def feed(self, model_input: Any) -> dict[str, Any]:
        """Return what to run a session on: a dictionary by name, or the value itself if there is only one input.

        Raises: ModelError that names the input, and what it must be.
        """
        only = self._only
        if only is not None and (type(model_input) in _NEVER_NAMED or not _is_named(only, model_input)):
            return {only.name: self._convert(only, model_input)}
        if not isinstance(model_input, Mapping):
            kind = with_article(type(model_input).__name__)
            raise ModelInputError(f"input for {self._model} is {kind}, not a dictionary; {self._expected()}")
        feed = {}
        for given in self.all:
            if given.name in model_input:
                feed[given.name] = self._convert(given, model_input[given.name])
            elif given.is_required:
                raise ModelInputError(f"missing key {given.name!r} for {self._model}; {self._expected()}")
        if len(feed) != len(model_input):
            self._add_others(feed, model_input)
        return feed

    def _add_others(self, feed: dict[str, Any], model_input: Mapping[str, Any]) -> None:
        for name, value in model_input.items():
            if name in self._optional:
                feed[name] = self._convert(self._optional[name], value)
            elif name not in self._by_name:
                raise ModelInputError(f"unknown key {name!r} for {self._model}; {self._expected()}")

    def _convert(self, given: OnnxInput, value: Any) -> Any:
        try:
            return given.convert(value)
        except (TensorError, ValueError, TypeError) as exc:
            raise ModelInputError(f"input {given.name!r} of {self._model} must be {given}, but {exc}") from None

    def _expected(self) -> str:
        return "expected: " + ", ".join(f"{given.name!r} ({given})" for given in self.all)


def _is_named(only: OnnxInput, model_input: Any) -> bool:
    """Return whether a value is a mapping with the name of the only input, not a value that is itself a map."""
    return isinstance(model_input, Mapping) and (only.is_tensor or only.name in model_input)


def _to_strings(value: Any) -> Array:
    """Return an array of str objects; bytes are decoded as UTF-8. Raises: TensorError."""
    if type(value) is np.ndarray and value.dtype.kind == "U":
        return value
    try:
        array = np.array(value, dtype=object)
    except ValueError:  # rows differ below the first level
        raise TensorError("the value is ragged: its rows differ in length") from None
    flat = array.ravel()
    for index, item in enumerate(flat.tolist()):
        if isinstance(item, bytes):
            try:
                flat[index] = item.decode()
            except UnicodeDecodeError:
                raise TensorError(
                    f"value {index} is bytes that UTF-8 can't decode; ONNX Runtime takes texts only"
                ) from None
        elif isinstance(item, list | tuple):
            raise TensorError("the value is ragged: its rows differ in length")
        elif not isinstance(item, str):
            raise TensorError(f"value {index} is of type {type(item).__name__}, not a string")
    return flat.reshape(array.shape)
