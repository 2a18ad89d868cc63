"""Load a model of any format that `cortex.models.formats` detects, for `type: model`.

request ── detect ── trust, requirements ──┬─ ONNX ──────── `clients.onnx.OnnxLoader` ──────────────┐
                                           ├─ SavedModel ── `clients.tensorflow.TensorFlowLoader` ──┼─► RunnableModel
                                           └─ others ────── `load` of the module in `_MODULES` ─────┘
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from cortex.errors import ModelError, ModelFormatError
from cortex.models.formats.content import ModelFormat
from cortex.models.formats.detection import Detection, check_signature, detect
from cortex.models.formats.requirements import (
    check_installed,
    installed_version,
    is_installed,
    with_minimum_versions,
)
from cortex.models.loader import LoadRequest, ModelLoader
from cortex.payloads.signature import ModelSignature
from cortex.predictor.importing import suggest_requirement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]


class RunnableModel(Protocol):
    """One loaded version of a model. Any number of threads use it at once."""

    @property
    def signature(self) -> ModelSignature:
        """Return its inputs and outputs."""
        ...

    def infer(self, inputs: Arrays, outputs: Sequence[str] = ()) -> Arrays:
        """Return at least the requested outputs, all if none is requested, by name.

        `inputs` has the names, datatypes and shapes of the signature, see `cortex.payloads.inference_tensors`. Elements
        of `BYTES` are bytes or str; those of outputs too. The first axis of all tensors of an estimator is the batch.

        Raises: ValueError with a message for callers (400), ModelError if the model fails.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The argument of the modules of all formats."""

    request: LoadRequest  #: its path is that of the detection
    detection: Detection
    threads: int  #: of one call, for libraries that can limit them

    def signature(self, platform: str, inputs: Any, outputs: Any) -> ModelSignature:
        """Return the signature of the model, described by what was detected."""
        return ModelSignature(self.request.model, platform, tuple(inputs), tuple(outputs), self.detection.reason)

    def error(self, message: str) -> ModelFormatError:
        """Return an error about the files of the model."""
        return ModelFormatError(f"{self.detection.path}: {message}")


#: Format → module with a function `load(LoadContext)`. Each imports the libraries of its format, and only those.
#: ONNX and SavedModel are loaded as for `type: onnx` and `type: tensorflow`.
_MODULES = {
    "skops": "cortex.predictor.estimators.sklearn",
    "pickle": "cortex.predictor.estimators.sklearn",
    "xgboost": "cortex.predictor.estimators.xgboost",
    "lightgbm": "cortex.predictor.estimators.lightgbm",
    "mlflow": "cortex.predictor.estimators.mlflow",
}


_SAVE_INSTEAD = "save the model as skops, ONNX or in the format of its library"


class DetectedLoader:
    """The `ModelLoader` of models whose format is detected. Thread-safe."""

    def __init__(
        self,
        trusts_pickle: bool = False,
        threads: int = 1,
        has_gpus: bool = False,
        tensorflow_serving: str | None = None,
    ) -> None:
        """Load models that use up to `threads` threads each."""
        self._trusts_pickle = trusts_pickle
        self._threads = threads
        self._has_gpus = has_gpus
        self._tensorflow_serving = tensorflow_serving
        self._loaders: dict[str, ModelLoader[Any]] = {}  #: by platform; only for ONNX and SavedModel
        self._stops: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def load(self, request: LoadRequest) -> RunnableModel:
        """Detect and load the model in `request.path`. Raises: ModelError."""
        detection = detect(request.path)
        sys.stderr.write(f"{request.label}: {detection.reason}\n")
        check_trust(detection, self._trusts_pickle)
        check_signature(detection)
        check_requirements(detection, self._trusts_pickle)
        found = replace(request, path=detection.path)
        if detection.format not in _MODULES:
            model: RunnableModel = self._loader_of(detection.format).load(found)
            return model
        try:
            module = importlib.import_module(_MODULES[detection.format])
            model = module.load(LoadContext(found, detection, self._threads))
        except ModelError:
            raise
        except ModuleNotFoundError as exc:
            name = exc.name or ""
            raise ModelFormatError(
                f"{detection.path} needs {name}, which is not installed; {suggest_requirement(name)}"
            ) from exc
        except Exception as exc:  # damaged files make libraries raise anything
            message = " ".join(str(exc).split())[:1000]
            raise ModelFormatError(f"{detection.path} can't be loaded: {type(exc).__name__}: {message}") from exc
        return model

    def unload(self, model: RunnableModel) -> None:
        """Release the resources of a model; an estimator is freed with its last reference."""
        loader = self._loaders.get(model.signature.platform)
        if loader is not None:
            loader.unload(model)

    def close(self) -> None:
        """Stop the processes of backends."""
        for stop in self._stops:
            stop()

    def _loader_of(self, format_: ModelFormat) -> ModelLoader[Any]:
        """Return the loader of ONNX or SavedModel, which all models of the format share."""
        platform, build = {
            "onnx": ("onnxruntime_onnx", self._onnx_loader),
            "tensorflow": ("tensorflow_savedmodel", self._tensorflow_loader),
        }[format_]
        with self._lock:
            if platform not in self._loaders:
                self._loaders[platform] = build()
            return self._loaders[platform]

    def _onnx_loader(self) -> ModelLoader[Any]:
        from cortex.predictor.clients.onnx import OnnxLoader  # noqa: PLC0415 - needs onnxruntime

        return OnnxLoader(self._has_gpus, self._threads, has_code=False)

    def _tensorflow_loader(self) -> ModelLoader[Any]:
        from cortex.predictor.clients.tensorflow import TensorFlowLoader  # noqa: PLC0415 - needs numpy
        from cortex.predictor.clients.tensorflow_backend import choose_backend  # noqa: PLC0415 - only for a SavedModel

        backend = choose_backend(self._tensorflow_serving)
        self._stops.append(backend.close)
        return TensorFlowLoader(backend, has_code=False)


def check_trust(detection: Detection, trusts_pickle: bool) -> None:
    """Raise ModelFormatError if loading the model runs code from its files, and nobody has said that it may."""
    if detection.needs_trust and not trusts_pickle:
        instead = "export it without them" if detection.format == "tensorflow" else _SAVE_INSTEAD
        raise ModelFormatError(
            f"{detection.reason}; {detection.code}; write `trust: pickle` if you trust it, or {instead}"
        )


def check_requirements(detection: Detection, trusts_pickle: bool) -> None:
    """Check the installed packages; a server may run a SavedModel without any. Raises: ModelFormatError.

    A deploy requires the minimum versions of models that nobody trusts; environments of older deploys stay in use.
    """
    required = detection.requirements
    if not trusts_pickle:
        safe = with_minimum_versions(required)
        required = tuple(old if is_installed(old) else new for old, new in zip(required, safe, strict=True))
    if detection.format == "tensorflow":
        required = tuple(each for each in required if installed_version(each.package) is not None)
    check_installed(required, detection.path)
