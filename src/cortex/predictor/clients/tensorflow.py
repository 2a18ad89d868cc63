"""TensorFlow models, whatever runs them: signatures, inputs and the `tensorflow_client`.

    TensorFlowClient ── models by name ──► TensorFlowModel ── arrays ──► Servable of a TensorFlowBackend
                                                                          ├ embedded_tensorflow: in this process
                                                                          ├ serving_process: a server of this process
                                                                          └ tensorflow_serving: an external server

This module imports numpy, but neither TensorFlow nor gRPC.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from cortex.errors import InputError, ModelError, ModelFormatError, ModelInputError, with_article
from cortex.models.formats.detection import describe_format
from cortex.models.formats.tensorflow_model import choose_signature, unusable_tensor
from cortex.models.loaded_models import ensure_call_scope
from cortex.models.loader import LoadRequest
from cortex.payloads.arrays import Array, TensorError
from cortex.payloads.inference_tensors import datatype_of
from cortex.payloads.signature import ModelSignature, TensorSignature
from cortex.predictor.clients.tensors import DTYPES, TensorSpec, to_array, to_flat
from cortex.projects.archive import unpack

_NOISE = ("Graph execution error:", "Detected at node", "<stack traces unavailable>", "[[{{")
_MESSAGE_LIMIT = 2000


@dataclass(frozen=True)
class SignatureInfo:
    """One signature of a SavedModel."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    method_name: str = ""

    def to_data(self) -> dict[str, Any]:
        """Return the `SignatureDef` in protobuf's JSON mapping."""
        sides = {"inputs": self.inputs, "outputs": self.outputs}
        described: dict[str, Any] = {
            side: {name: _tensor_info(spec) for name, spec in specs.items()} for side, specs in sides.items()
        }
        return {**described, "methodName": self.method_name} if self.method_name else described


class Servable(Protocol):
    """A model that a backend has loaded. Thread-safe."""

    @property
    def signatures(self) -> Mapping[str, SignatureInfo]: ...

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature; `inputs` has each of its inputs, with its type and shape. Raises: ModelError."""
        ...


S = TypeVar("S", bound=Servable)


class TensorFlowBackend(Protocol[S]):
    """Loads and runs SavedModels: TensorFlow in this process, or a server."""

    def load(self, request: LoadRequest) -> S:
        """Load the model in `request.path`. Raises: ModelError."""
        ...

    def unload(self, servable: S) -> None:
        """Release all resources of a model, which must not be called afterwards."""
        ...

    def close(self) -> None:
        """Stop the processes of the backend."""
        ...


class TensorFlowModel(Generic[S]):
    """A loaded model and the signature to run."""

    def __init__(self, request: LoadRequest, servable: S) -> None:
        """Choose the signature. Raises: ModelError if the choice is ambiguous."""
        self.request = request
        self.servable = servable
        self.signature_key = choose_signature(servable.signatures, request.signature_key, request.label)
        self._signature = servable.signatures[self.signature_key]

    def predict(self, model_input: Any) -> dict[str, list[Any]]:
        """Run the model on a mapping of input names to values; see `to_array` and `to_flat`.

        A model with one input also accepts the bare value. Raises: ModelError.
        """
        outputs = self.servable.run(self.signature_key, self._arrays(model_input))
        return {name: to_flat(array) for name, array in outputs.items()}

    def warm_up(self) -> None:
        """Run the model once on zeros, so that the first request need not wait for lazy initialization.

        Unspecified sizes are 1. Errors are ignored: a model may reject zeros.
        """
        shapes = {name: tuple(size or 1 for size in spec.shape or ()) for name, spec in self._signature.inputs.items()}
        if any(spec.dtype not in DTYPES for spec in self._signature.inputs.values()):
            return
        zero: dict[str, Any] = {
            name: to_array(_zeros(shapes[name], spec), spec) for name, spec in self._signature.inputs.items()
        }
        try:
            self.servable.run(self.signature_key, zero)
        except ModelError:
            return

    def describe(self, timestamp: int) -> dict[str, Any]:
        """Return the entry of the model in the response to GET."""
        return {
            "disk_path": self.request.path,
            "signature_def": self._signature_def,
            "signature_key": self.signature_key,
            "input_signatures": self.input_signatures,
            "timestamp": timestamp,
        }

    @cached_property
    def signature(self) -> ModelSignature:
        """Return the inputs and outputs of the signature that is run, if the protocol has their types."""
        inputs, outputs = (
            tuple(
                TensorSignature(
                    name,
                    datatype,
                    spec.open_shape,
                    any_shape=spec.shape is None,
                )
                for name, spec in specs.items()
                if spec.dtype in DTYPES and (datatype := datatype_of(DTYPES[spec.dtype].numpy)) is not None
            )
            for specs in (self._signature.inputs, self._signature.outputs)
        )
        reason = describe_format(self.request.path)
        return ModelSignature(self.request.model, "tensorflow_savedmodel", inputs, outputs, reason)

    def check_types(self) -> None:
        """Check that requests without code can run the model. Raises: ModelFormatError."""
        inputs, outputs = (
            {name: spec.dtype for name, spec in specs.items()}
            for specs in (self._signature.inputs, self._signature.outputs)
        )
        if reason := unusable_tensor(inputs, outputs):
            raise ModelFormatError(f"{self.request.label} {reason}")

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Run the model on arrays by name. Raises: ModelError."""
        found = self.servable.run(self.signature_key, self._arrays(inputs))
        return {name: array for name, array in found.items() if not outputs or name in outputs}

    @property
    def input_signatures(self) -> dict[str, dict[str, Any]]:
        """Return the shape and type of each input; unspecified sizes are -1."""
        return {
            name: {
                "shape": None if spec.shape is None else [-1 if n is None else n for n in spec.shape],
                "type": DTYPES[spec.dtype].plain if spec.dtype in DTYPES else spec.type_name,
            }
            for name, spec in self._signature.inputs.items()
        }

    @property
    def handler_signatures(self) -> tuple[Any, Any]:
        """Return the `signature` of request handlers, the same for both of their functions: all of the model's."""
        return self._signature_def, self._signature_def

    @cached_property
    def _signature_def(self) -> dict[str, Any]:
        return {key: value.to_data() for key, value in self.servable.signatures.items()}

    def _arrays(self, model_input: Any) -> dict[str, Array]:
        wanted = self._signature.inputs
        if not isinstance(model_input, Mapping):
            if len(wanted) != 1:
                found = f"{with_article(type(model_input).__name__)}, not a dictionary"
                raise ModelInputError(f"input for {self.request.label} is {found}; {_expected(wanted)}")
            model_input = {next(iter(wanted)): model_input}
        for name in model_input:
            if name not in wanted:
                raise ModelInputError(f"unknown key {name!r} for {self.request.label}; {_expected(wanted)}")
        arrays = {}
        for name, spec in wanted.items():
            if name not in model_input:
                raise ModelInputError(f"missing key {name!r} for {self.request.label}; {_expected(wanted)}")
            try:
                arrays[name] = to_array(model_input[name], spec)
            except TensorError as e:
                raise ModelInputError(f"input {name!r} of {self.request.label} must be {spec}, but {e}") from None
        return arrays


class TensorFlowLoader(Generic[S]):
    """The `ModelLoader` of TensorFlow models: loads them with the backend and warms them up."""

    def __init__(self, backend: TensorFlowBackend[S], *, has_code: bool = True) -> None:
        """Without code around them, only models whose inputs and outputs have JSON forms are loaded."""
        self._backend = backend
        self._has_code = has_code
        # Weak references: the registry counts strong ones to find models in use.
        self._loaded: WeakValueDictionary[int, TensorFlowModel[S]] = WeakValueDictionary()
        self._unpacked: dict[int, tempfile.TemporaryDirectory[str]] = {}  #: by model: the folder of its archive
        self._lock = threading.Lock()

    def load(self, request: LoadRequest) -> TensorFlowModel[S]:
        """Load a model: a folder, or an archive with one. Raises: ModelError."""
        archive = find_archive(Path(request.path))
        unpacked, path = (None, request.path) if archive is None else unpack_model(archive)
        try:
            servable = self._backend.load(replace(request, path=str(path)))
            try:
                model = TensorFlowModel(replace(request, path=str(path)), servable)
                if not self._has_code:
                    model.check_types()
                model.warm_up()
            except BaseException:
                self._backend.unload(servable)
                raise
        except BaseException:
            if unpacked is not None:
                unpacked.cleanup()
            raise
        with self._lock:
            self._loaded[id(model)] = model
            if unpacked is not None:
                self._unpacked[id(model)] = unpacked
        return model

    def unload(self, model: TensorFlowModel[S]) -> None:
        """Release all resources of a model."""
        with self._lock:
            self._loaded.pop(id(model), None)
            unpacked = self._unpacked.pop(id(model), None)
        self._backend.unload(model.servable)
        if unpacked is not None:
            unpacked.cleanup()

    def loaded(self) -> list[TensorFlowModel[S]]:
        """Return the models that are loaded."""
        with self._lock:
            return list(self._loaded.values())


class TensorFlowModels(Protocol):
    """The models of a client: the registry, or those of an external server."""

    def get(self, name: str | None = None, version: str = "latest") -> TensorFlowModel[Any]: ...
    def describe(self) -> Mapping[str, Mapping[str, Any]]: ...


class TensorFlowClient:
    """The `tensorflow_client` of the user's constructor: runs exported TensorFlow models. Thread-safe."""

    def __init__(self, models: TensorFlowModels, loaded: Callable[[], list[TensorFlowModel[Any]]]) -> None:
        self._models = models
        self._loaded = loaded  #: returns the models that are loaded

    def predict(
        self, model_input: Any, model_name: str | None = None, model_version: str = "latest"
    ) -> dict[str, list[Any]]:
        """Run a model on a dictionary of input names to values.

        Returns the values of each output as a flat list, as in the JSON mapping of TensorFlow Serving's response:
        64-bit integers as strings, strings as base64. Raises: ModelError.
        """
        with ensure_call_scope():
            return self._models.get(model_name, model_version).predict(model_input)

    def describe(self) -> dict[str, Any]:
        """Return `model_metadata` for a GET: `{"<name>-<version>": …}` for each loaded model."""
        timestamps = {
            (name, version): timestamp
            for name, entry in self._models.describe().items()
            for version, timestamp in zip(entry["versions"], entry["timestamps"], strict=True)
        }
        loaded = sorted(self._loaded(), key=lambda model: (model.request.model, model.request.version))
        return {
            f"{model.request.model}-{model.request.version}": model.describe(
                timestamps.get((model.request.model, model.request.version), 0)
            )
            for model in loaded
        }


def read_signature(definition: Any) -> SignatureInfo:
    """Convert a `SignatureDef` of TensorFlow or of `tensorflow_serving`; names are sorted, as maps are unordered."""
    return SignatureInfo(
        inputs={name: _read_spec(definition.inputs[name]) for name in sorted(definition.inputs)},
        outputs={name: _read_spec(definition.outputs[name]) for name in sorted(definition.outputs)},
        method_name=definition.method_name,
    )


def clean_message(error: object) -> str:
    """Return the message of a TensorFlow error without the parts that describe nodes of the graph."""
    text = str(getattr(error, "message", None) or error).partition("Original stack trace for")[0]
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(_NOISE))[:_MESSAGE_LIMIT]


def _expected(wanted: Mapping[str, TensorSpec]) -> str:
    return "expected: " + ", ".join(f"{name!r} ({spec})" for name, spec in wanted.items())


def _read_spec(info: Any) -> TensorSpec:
    shape = info.tensor_shape
    sizes = None if shape.unknown_rank else tuple(None if dim.size < 0 else dim.size for dim in shape.dim)
    return TensorSpec(info.dtype, sizes, info.name)


def _zeros(shape: tuple[int, ...], spec: TensorSpec) -> Any:
    value: Any = "" if DTYPES[spec.dtype].name == "DT_STRING" else 0
    for size in reversed(shape):
        value = [value] * size
    return value


def _tensor_info(spec: TensorSpec) -> dict[str, Any]:
    shape: dict[str, Any] = {"unknownRank": True}
    if spec.shape is not None:
        shape = {"dim": [{"size": str(-1 if size is None else size)} for size in spec.shape]} if spec.shape else {}
    return {"name": spec.tensor, "dtype": spec.type_name, "tensorShape": shape}


# SavedModels in ZIP archives, the form of 0.8 to 0.11: a version folder at the top, such as `1568244606/`.

_MARK = "saved_model.pb"


def find_archive(path: Path) -> Path | None:
    """Return the ZIP archive at a path, which is the file or a folder with nothing else; None if there is none."""
    files = [path] if path.is_file() else list(path.iterdir()) if path.is_dir() else []
    return files[0] if len(files) == 1 and files[0].suffix == ".zip" else None


def unpack_model(archive: Path) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Unpack an archive; return the folder, which the caller removes, and that of the highest version in it.

    Raises: ModelError if the archive is invalid, too large, or has no SavedModel.
    """
    folder = tempfile.TemporaryDirectory(prefix="cortex-model-")
    try:
        content = Path(folder.name, "content")
        unpack(archive.read_bytes(), content)
        versions = sorted((file.parent for file in content.rglob(_MARK)), key=_order)
        if not versions:
            raise ModelError(f"{archive.name} has no SavedModel: no folder in it has the file {_MARK}")
    except InputError as error:
        folder.cleanup()
        raise ModelError(f"{archive.name} can't be unpacked: {error}") from error
    except BaseException:
        folder.cleanup()
        raise
    return folder, versions[-1]


def _order(folder: Path) -> tuple[int, str]:
    return int(folder.name) if folder.name.isdecimal() else -1, str(folder)
