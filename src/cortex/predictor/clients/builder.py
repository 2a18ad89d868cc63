"""Build the model client of an API: the registry with its loader, and the client of the user's code.

    handler.type    builder        loader                                 client
    python          _python        `PythonLoader`                         `ModelClient`
    onnx            _onnx          `clients.onnx.OnnxLoader`              `OnnxClient`
    tensorflow      _tensorflow    `clients.tensorflow.TensorFlowLoader`  `TensorFlowClient`
    model           _model         `estimators.loader.DetectedLoader`     none: `served_models` instead

The module of each type is imported for that type only, as it needs libraries that others do not have. An API without
code has `served_models`, whatever its type.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex.errors import ModelError, ModelFormatError, UserError
from cortex.models.loader import LoadEvents, LoadRequest, ModelFetcher, ModelLoader
from cortex.models.registry import Registry
from cortex.models.spec import Catalogue, ModelSource, Version
from cortex.predictor.clients.tensorflow_backend import choose_backend, external_models, is_external
from cortex.predictor.importing import suggest_requirement
from cortex.predictor.interface import LOAD_MODEL
from cortex.predictor.tracebacks import user_code
from cortex.processes.limits import thread_share

if TYPE_CHECKING:
    from cortex.predictor.inference.registry_models import RegistryModels
    from cortex.predictor.loader import LoadSpec

#: Maximum number of threads of all models of a process. Beyond it, a model uses only the calling thread.
_MAX_THREADS = 64


@dataclass(frozen=True)
class Clients:
    """The models of an API and the client for its code."""

    registry: Registry[Any] | None  #: None if an external server manages the models
    client: object  #: the argument of the constructor
    describe: Callable[[], dict[str, Any]]  #: returns the `model_metadata` of a GET
    bind: Callable[[object], None] | None = None  #: passes the user's object to the loader, before `__init__`
    stop: Callable[[], None] | None = None  #: stops the backend
    served_models: RegistryModels | None = None  #: of an API without code

    def close(self) -> None:
        """Unload all models and stop the backend."""
        if self.registry is not None:
            self.registry.close()
        if self.stop is not None:
            self.stop()


#: (type, missing module) → the fix, where more than the module is missing.
_FIXES = {
    ("tensorflow", "numpy"): "add tensorflow-cpu to requirements.txt, or, for models in a TensorFlow Serving server, "
    "grpcio, protobuf and numpy"
}


def missing_library(spec: LoadSpec, error: ModuleNotFoundError) -> UserError:
    """Return the error for a library that is not installed, with all lines that models on this machine need."""
    from cortex.models.formats.detection import detect  # noqa: PLC0415 - only after a mistake
    from cortex.models.formats.requirements import check_installed  # noqa: PLC0415 - as above

    module = error.name or ""
    fix = _FIXES.get((spec.type, module)) or suggest_requirement(module)
    if spec.type == "model" and spec.models is not None:
        try:
            for model in spec.models.paths:
                if Path(model.url).exists():
                    found = detect(model.url)
                    check_installed(found.requirements, found.path)
        except ModelFormatError as exc:
            return UserError(str(exc))
        fix += "; each format needs packages of its own, such as onnxruntime for ONNX"
    return UserError(f"type: {spec.type} needs {module}, which is not installed; {fix}")


def build_clients(
    spec: LoadSpec,
    catalogue: Catalogue | None = None,
    fetcher: ModelFetcher | None = None,
    events: LoadEvents | None = None,
) -> Clients | None:
    """Build the clients of an API, without loading models; None if it has no models.

    Without `fetcher`, only versions whose files are on this machine can be loaded; without `events`, none are sent.

    Raises: UserError if a library for the type of model is not installed.
    """
    if spec.models is None:
        return None
    source = spec.models

    def registry_of(loader: ModelLoader[Any]) -> Registry[Any]:
        return Registry(source, catalogue or Catalogue(()), loader, fetcher or _NoFetcher(), events or _NoEvents())

    try:
        clients = _BUILDERS[spec.type](spec, registry_of, _count(source, catalogue))
    except ModuleNotFoundError as exc:
        raise missing_library(spec, exc) from exc
    if spec.path or clients.registry is None:
        return clients
    from cortex.predictor.inference.registry_models import RegistryModels  # noqa: PLC0415 - only APIs without code need it

    return replace(clients, served_models=RegistryModels(spec.api, source, clients.registry))


_RegistryOf = Callable[[ModelLoader[Any]], Registry[Any]]


def _python(spec: LoadSpec, registry_of: _RegistryOf, count: int) -> Clients:
    loader = PythonLoader()
    registry = registry_of(loader)
    client = ModelClient(registry)
    return Clients(registry, client, client.describe, loader.bind)


def _onnx(spec: LoadSpec, registry_of: _RegistryOf, count: int) -> Clients:
    from cortex.predictor.clients import onnx  # noqa: PLC0415 - needs onnxruntime

    loader = onnx.OnnxLoader(bool(spec.gpu_ids), choose_threads(_share(spec), count), has_code=bool(spec.path))
    registry = registry_of(loader)
    client = onnx.OnnxClient(registry, loader)
    return Clients(registry, client, client.describe)


def _tensorflow(spec: LoadSpec, registry_of: _RegistryOf, count: int) -> Clients:
    from cortex.predictor.clients import tensorflow  # noqa: PLC0415 - needs numpy

    address = spec.tensorflow_serving
    if address is not None and spec.models is not None and is_external(address):
        models = external_models(address, spec.models)
        client = tensorflow.TensorFlowClient(models, models.loaded)
        return Clients(None, client, client.describe)
    backend = choose_backend(address)
    if spec.max_batch_size and spec.path:
        from cortex.predictor.clients import tensorflow_batching  # noqa: PLC0415 - needs numpy

        backend = tensorflow_batching.BatchingBackend(backend, spec.max_batch_size, spec.isolates_failures)
    loader = tensorflow.TensorFlowLoader(backend, has_code=bool(spec.path))
    registry = registry_of(loader)
    client = tensorflow.TensorFlowClient(registry, loader.loaded)
    return Clients(registry, client, client.describe, stop=backend.close)


def _model(spec: LoadSpec, registry_of: _RegistryOf, count: int) -> Clients:
    from cortex.predictor.estimators.loader import DetectedLoader  # noqa: PLC0415 - other types do not need it

    threads = choose_threads(_share(spec), count)
    loader = DetectedLoader(spec.trusts_pickle, threads, bool(spec.gpu_ids), spec.tensorflow_serving)
    registry = registry_of(loader)
    return Clients(registry, None, registry.describe, stop=loader.close)


def _share(spec: LoadSpec) -> int:
    """Return the number of threads for the computations of this process, which may be pinned to its processors."""
    return thread_share(1 if spec.pin_processes else len(spec.sockets))


def choose_threads(share: int, models: int) -> int:
    """Return the number of threads of one model: OMP_NUM_THREADS if set, else the process's share or less."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) not in (0, share):  # workers set it to the share, see `set_environment`
        return int(wanted)
    return max(1, min(share, _MAX_THREADS // max(models, 1)))


_BUILDERS: Mapping[str, Callable[[LoadSpec, _RegistryOf, int], Clients]] = {
    "python": _python,
    "model": _model,
    "onnx": _onnx,
    "tensorflow": _tensorflow,
}


def _count(source: ModelSource, catalogue: Catalogue | None) -> int:
    """Estimate how many models are in memory at a time."""
    models = max(len(source.paths), len(catalogue.models) if catalogue else 0)
    return models if source.cache_size is None else min(models, source.cache_size)


class ModelClient:
    """The `python_client` and `model_client` of Python code. Thread-safe."""

    def __init__(self, registry: Registry[Any]) -> None:
        self._registry = registry

    def get_model(self, model_name: str | None = None, model_version: str = "latest") -> Any:
        """Return the result of `load_model` for a version of a model; "latest" is the highest. Raises: ModelError."""
        return self._registry.get(model_name, model_version)

    def describe(self) -> dict[str, Any]:
        """Return the versions and timestamps of each model."""
        return {
            name: {"versions": entry["versions"], "timestamps": entry["timestamps"]}
            for name, entry in self._registry.describe().items()
        }


class PythonLoader:
    """The `ModelLoader` of Python models: calls the user's `load_model`."""

    def __init__(self) -> None:
        self._load_model: Callable[..., Any] | None = None

    def bind(self, instance: object) -> None:
        """Set the object whose `load_model` to call."""
        self._load_model = getattr(instance, LOAD_MODEL)

    def load(self, request: LoadRequest) -> Any:
        """Load a folder with the user's code. Raises: UserError with the user's frames."""
        if self._load_model is None:
            raise ModelError(f"{LOAD_MODEL}() can't be called before the object exists")
        with user_code(f"by {LOAD_MODEL}()"):
            model = self._load_model(model_path=request.path)
        if inspect.iscoroutine(model):
            model.close()
            raise ModelError(f"{LOAD_MODEL}() must be a plain function, not `async def`")
        return model

    def unload(self, model: Any) -> None:
        """Do nothing: the model is freed with its last reference."""


class _NoFetcher:
    def fetch(self, model: str, version: Version) -> Path:
        raise ModelError(
            f"the files of version {version.number} are not on this machine, and there is no model agent to fetch them"
        )

    def release(self, version: Version) -> None:
        pass


class _NoEvents:
    def loading(self, model: str, version: Version) -> None:
        pass

    def requested(self, model: str, version: Version) -> None:
        pass

    def loaded(self, versions: Sequence[tuple[str, Version]]) -> None:
        pass

    def failed(self, model: str, version: Version, message: str, detail: str) -> None:
        pass
