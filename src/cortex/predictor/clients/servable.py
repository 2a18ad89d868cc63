"""What a loaded TensorFlow model is to the client, whichever library or server runs it: signatures, and a call.

Pure but for the calls into a backend. It must not know where models come from.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from cortex.errors import ModelError
from cortex.models.loader import LoadRequest
from cortex.models.spec import DEFAULT_MODEL
from cortex.predictor.clients.tensors import DTYPES, Array, TensorError, TensorSpec, to_array, to_flat

#: Tried in this order where nobody said which signature to run and there are several. Exporters of TensorFlow 2 and
#: Keras write the second beside signatures of other purposes, and TensorFlow Serving takes it when none is named.
PREFERRED_SIGNATURES = ("predict", "serving_default")
#: Exporters put signatures for themselves, such as `__saved_model_init_op`, beside those of the user.
_INTERNAL_PREFIX = "__saved_model_"
_NOISE = ("Graph execution error:", "Detected at node", "<stack traces unavailable>", "[[{{")
_MESSAGE_LIMIT = 2000


@dataclass(frozen=True)
class SignatureInfo:
    """One signature of a SavedModel."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    method_name: str = ""

    def to_data(self) -> dict[str, Any]:
        """Return protobuf's JSON mapping of the `SignatureDef`."""
        sides = {"inputs": self.inputs, "outputs": self.outputs}
        described: dict[str, Any] = {
            side: {name: _tensor_info(spec) for name, spec in specs.items()} for side, specs in sides.items()
        }
        return {**described, "methodName": self.method_name} if self.method_name else described


class Servable(Protocol):
    """A model that a backend has loaded. Any thread may call it, several at once."""

    @property
    def signatures(self) -> Mapping[str, SignatureInfo]: ...

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature on all of its inputs, each of the type and shape that it asks for. Raises: ModelError."""
        ...


S = TypeVar("S", bound=Servable)


class Backend(Protocol[S]):
    """Loads SavedModels and runs them: TensorFlow in this process, or a server."""

    def load(self, request: LoadRequest) -> S:
        """Load what is in `request.path`. Raises: ModelError."""
        ...

    def unload(self, servable: S) -> None:
        """Release all that the model took; nobody calls it any more."""
        ...

    def close(self) -> None:
        """End what the backend started."""
        ...


class TensorFlowModel(Generic[S]):
    """A loaded model with the signature that is run."""

    def __init__(self, request: LoadRequest, servable: S) -> None:
        """Choose the signature. Raises: ModelError if it is not clear which."""
        self.request = request
        self.servable = servable
        self.signature_key = choose_signature(servable.signatures, request.signature_key, named(request))
        self._signature = servable.signatures[self.signature_key]

    def predict(self, model_input: Any) -> dict[str, list[Any]]:
        """Run the model on a mapping from input names to values; see `to_array` and `to_flat`.

        A model with one input also takes the value alone. Raises: ModelError.
        """
        outputs = self.servable.run(self.signature_key, self._arrays(model_input))
        return {name: to_flat(array) for name, array in outputs.items()}

    def warm_up(self) -> None:
        """Run it once on zeros, so that the first request need not wait for what is prepared on first use.

        Sizes that are left open are 1. What the model makes of zeros is its own affair: it may refuse them.
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
        """Return what a GET is told about it."""
        inputs = {
            name: {
                "shape": None if spec.shape is None else [-1 if n is None else n for n in spec.shape],
                "type": DTYPES[spec.dtype].plain if spec.dtype in DTYPES else spec.type_name,
            }
            for name, spec in self._signature.inputs.items()
        }
        return {
            "disk_path": self.request.path,
            "signature_def": {key: value.to_data() for key, value in self.servable.signatures.items()},
            "signature_key": self.signature_key,
            "input_signatures": inputs,
            "timestamp": timestamp,
        }

    def _arrays(self, model_input: Any) -> dict[str, Array]:
        wanted = self._signature.inputs
        if not isinstance(model_input, Mapping):
            if len(wanted) != 1:
                kind = type(model_input).__name__
                raise ModelError(f"input for {named(self.request)} is a {kind}, not a dictionary; {_expected(wanted)}")
            model_input = {next(iter(wanted)): model_input}
        for name in model_input:
            if name not in wanted:
                raise ModelError(f"unknown key {name!r} for {named(self.request)}; {_expected(wanted)}")
        arrays = {}
        for name, spec in wanted.items():
            if name not in model_input:
                raise ModelError(f"missing key {name!r} for {named(self.request)}; {_expected(wanted)}")
            try:
                arrays[name] = to_array(model_input[name], spec)
            except TensorError as e:
                raise ModelError(f"input {name!r} of {named(self.request)} must be {spec}, but {e}") from None
        return arrays


class TensorFlowLoader(Generic[S]):
    """Loads models for the registry: by the backend, with their signature chosen, warmed up."""

    def __init__(self, backend: Backend[S]) -> None:
        self._backend = backend
        # Weakly: whoever else refers to a model is taken to be using it.
        self._loaded: WeakValueDictionary[int, TensorFlowModel[S]] = WeakValueDictionary()
        self._turn = threading.Lock()

    def load(self, request: LoadRequest) -> TensorFlowModel[S]:
        """Load a model. Raises: ModelError."""
        servable = self._backend.load(request)
        try:
            model = TensorFlowModel(request, servable)
            model.warm_up()
        except BaseException:
            self._backend.unload(servable)
            raise
        with self._turn:
            self._loaded[id(model)] = model
        return model

    def unload(self, model: TensorFlowModel[S]) -> None:
        """Release all that the model took."""
        with self._turn:
            self._loaded.pop(id(model), None)
        self._backend.unload(model.servable)

    def loaded(self) -> list[TensorFlowModel[S]]:
        """List what is loaded just now."""
        with self._turn:
            return list(self._loaded.values())


def choose_signature(signatures: Mapping[str, object], configured: str | None, model: str) -> str:
    """Choose the signature to run: the configured one, the only one, or a preferred one, in this order.

    Raises: ModelError naming those that there are; `model` says whose they are.
    """
    keys = sorted(key for key in signatures if not key.startswith(_INTERNAL_PREFIX))
    shown = ", ".join(map(repr, keys)) or "none"
    if configured is not None:
        if configured in signatures:
            return configured
        raise ModelError(f"signature_key {configured!r} is not a signature of {model}; there are: {shown}")
    if len(keys) == 1:
        return keys[0]
    for key in PREFERRED_SIGNATURES:
        if key in keys:
            return key
    if not keys:
        raise ModelError(f"{model} has no signature; export it with `signatures=…`")
    raise ModelError(f"{model} has several signatures: {shown}; say which to run: signature_key in cortex.yaml")


def named(request: LoadRequest) -> str:
    """Name a model in a message; the one of `path` has no name that the user knows."""
    if request.model == DEFAULT_MODEL:
        return f"the model of version {request.version}"
    return f"model {request.model!r} of version {request.version}"


def read_signature(definition: Any) -> SignatureInfo:
    """Read a `SignatureDef`, of our classes or of TensorFlow's; names are sorted, for maps have no order."""
    return SignatureInfo(
        inputs={name: _read_spec(definition.inputs[name]) for name in sorted(definition.inputs)},
        outputs={name: _read_spec(definition.outputs[name]) for name in sorted(definition.outputs)},
        method_name=definition.method_name,
    )


def plain(told: object) -> str:
    """Return what an error of TensorFlow's says, without where the graph's nodes are and how they were made."""
    text = str(getattr(told, "message", None) or told).partition("Original stack trace for")[0]
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
