"""Build the model client of an API: the registry with its loader, and the client of the user's code.

    handler.type    builder        loader                                 client
    python          _python        `clients.python.PythonLoader`          `ModelClient`
    onnx            _onnx          `clients.onnx.OnnxLoader`              `OnnxClient`
    tensorflow      _tensorflow    `clients.tensorflow.TensorFlowLoader`  `TensorFlowClient`
    model           _model         `estimators.loader.DetectedLoader`     none: `served_models` instead

The module of each type is imported for that type only, as it needs libraries that others do not have. An API without
code has `served_models`, whatever its type.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex.errors import ModelError, ModelFormatError, UserError
from cortex.models.loader import LoadEvents, ModelFetcher, ModelLoader
from cortex.models.registry import Registry
from cortex.models.spec import Catalogue, ModelSource, Version
from cortex.predictor.importing import suggest_requirement
from cortex.processes.limits import thread_share

if TYPE_CHECKING:
    from cortex.predictor.clients.tensorflow import TensorFlowBackend
    from cortex.predictor.clients.tensorflow_serving import ExternalModels
    from cortex.predictor.inference.registry_models import RegistryModels
    from cortex.predictor.loader import LoadSpec

#: The value of `tensorflow_serving` in a configuration that starts a server for each process.
LOCAL = "local"
SERVER = "tensorflow_model_server"
_GRPC = {"grpc": "grpcio", "google.protobuf": "protobuf"}

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
    from cortex.predictor.clients import python  # noqa: PLC0415 - other types do not need it

    loader = python.PythonLoader()
    registry = registry_of(loader)
    client = python.ModelClient(registry)
    return Clients(registry, client, client.describe, loader.bind)


def _onnx(spec: LoadSpec, registry_of: _RegistryOf, count: int) -> Clients:
    from cortex.predictor.clients import onnx  # noqa: PLC0415 - needs onnxruntime

    loader = onnx.OnnxLoader(bool(spec.gpu_ids), choose_threads(thread_share(len(spec.sockets)), count))
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
    loader = tensorflow.TensorFlowLoader(backend)
    registry = registry_of(loader)
    client = tensorflow.TensorFlowClient(registry, loader.loaded)
    return Clients(registry, client, client.describe, stop=backend.close)


def _model(spec: LoadSpec, registry_of: _RegistryOf, count: int) -> Clients:
    from cortex.predictor.estimators.loader import DetectedLoader  # noqa: PLC0415 - other types do not need it

    threads = choose_threads(thread_share(len(spec.sockets)), count)
    loader = DetectedLoader(spec.trusts_pickle, threads, bool(spec.gpu_ids), spec.tensorflow_serving)
    registry = registry_of(loader)
    return Clients(registry, None, registry.describe, stop=loader.close)


def choose_threads(share: int, models: int) -> int:
    """Return the number of threads of one model: OMP_NUM_THREADS if set, else the process's share or less."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) not in (0, share):  # workers set it to the share, see `set_environment`
        return int(wanted)
    return max(1, min(share, _MAX_THREADS // max(models, 1)))


def is_external(tensorflow_serving: str | None) -> bool:
    """Return whether an external server manages the models, so that none is fetched or loaded here."""
    return tensorflow_serving not in (None, LOCAL)


def choose_backend(tensorflow_serving: str | None) -> TensorFlowBackend[Any]:
    """Return the backend for a value of `tensorflow_serving`: LOCAL starts a server for this process.

    None uses TensorFlow in this process if it is installed, otherwise a server on PATH. Raises: ModelError if there is
    neither.
    """
    if tensorflow_serving is None and _is_installed("tensorflow"):
        from cortex.predictor.clients.embedded_tensorflow import EmbeddedTensorFlow  # noqa: PLC0415 - needs numpy

        return EmbeddedTensorFlow()
    executable = shutil.which(SERVER)
    if executable is None:
        fix = f"put {SERVER} on PATH"
        if tensorflow_serving is None:
            fix = f"add tensorflow-cpu (or tensorflow) to requirements.txt, or {fix}"
        raise ModelError(f"TensorFlow models can't be run: neither TensorFlow nor {SERVER} is installed; {fix}")
    _require_grpc(f"the {SERVER} on PATH")
    from cortex.predictor.clients.serving_process import LocalServer  # noqa: PLC0415 - needs grpcio

    return LocalServer(executable)


def external_models(address: str, source: ModelSource) -> ExternalModels:
    """Return the models of the TensorFlow Serving server at `host:port`. Connects on first use."""
    _require_grpc(f"TensorFlow Serving at {address}")
    from cortex.predictor.clients.tensorflow_serving import ExternalModels  # noqa: PLC0415 - needs grpcio

    return ExternalModels(address, source)


def _require_grpc(what: str) -> None:
    missing = [package for module, package in _GRPC.items() if not _is_installed(module)]
    if missing:
        raise ModelError(f"{what} can't be called: add {' and '.join(missing)} to requirements.txt")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


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
