"""The `tensorflow_client` that users' constructors are given, and the choice of what runs the models.

It must not know how TensorFlow or a server is called, nor where models come from.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from cortex.errors import ModelError
from cortex.models.loaded_models import ensure_call_scope
from cortex.models.spec import ModelSource
from cortex.predictor.clients.servable import Backend, TensorFlowModel

#: `tensorflow_serving: local` in a configuration: start a server for each process.
LOCAL = "local"
SERVER = "tensorflow_model_server"
_GRPC = {"grpc": "grpcio", "google.protobuf": "protobuf"}


class Models(Protocol):
    """Where the client gets its models: the registry, or a server that manages its own."""

    def get(self, name: str | None = None, version: str = "latest") -> TensorFlowModel[Any]: ...
    def describe(self) -> Mapping[str, Mapping[str, Any]]: ...


@runtime_checkable
class Loaded(Protocol):
    """Who knows which models are loaded just now."""

    def loaded(self) -> list[TensorFlowModel[Any]]: ...


class TensorFlowClient:
    """Runs exported TensorFlow models; any thread may call it."""

    def __init__(self, models: Models, loader: Loaded | None = None) -> None:
        """Take the registry and its loader, or the models of a server elsewhere alone."""
        self._models = models
        self._loader = loader or (models if isinstance(models, Loaded) else None)

    def predict(
        self, model_input: Any, model_name: str | None = None, model_version: str = "latest"
    ) -> dict[str, list[Any]]:
        """Run a model on a dictionary from the names of its inputs to their values.

        Returns the values of each output as a flat list, as the JSON mapping of TensorFlow Serving's response has
        them: 64-bit integers as strings, strings as base64. Raises: ModelError.
        """
        with ensure_call_scope():
            return self._models.get(model_name, model_version).predict(model_input)

    def describe(self) -> dict[str, Any]:
        """Return `model_metadata` for a GET: `{"<name>-<version>": …}` of each model that is loaded."""
        if self._loader is None:
            return {}
        timestamps = {
            (name, version): timestamp
            for name, entry in self._models.describe().items()
            for version, timestamp in zip(entry["versions"], entry["timestamps"], strict=True)
        }
        loaded = sorted(self._loader.loaded(), key=lambda model: (model.request.model, model.request.version))
        return {
            f"{model.request.model}-{model.request.version}": model.describe(
                timestamps.get((model.request.model, model.request.version), 0)
            )
            for model in loaded
        }


def is_external(tensorflow_serving: str | None) -> bool:
    """Tell whether models are a server's own affair: nothing is fetched or loaded here then."""
    return tensorflow_serving not in (None, LOCAL)


def choose_backend(tensorflow_serving: str | None) -> Backend[Any]:
    """Return what runs the models of this process: LOCAL is a server started for it, None leaves the choice.

    None prefers TensorFlow in this process to a server on PATH. Raises: ModelError if there is neither.
    """
    if tensorflow_serving is None and _is_installed("tensorflow"):
        from cortex.predictor.clients.tensorflow import EmbeddedTensorFlow  # noqa: PLC0415 - needs TensorFlow

        return EmbeddedTensorFlow()
    executable = shutil.which(SERVER)
    if executable is None:
        fix = f"put {SERVER} on PATH"
        if tensorflow_serving is None:
            fix = f"add tensorflow-cpu (or tensorflow) to requirements.txt, or {fix}"
        raise ModelError(f"nothing here can run TensorFlow models: {fix}")
    _require_grpc(f"the {SERVER} on PATH")
    from cortex.predictor.clients.serving_process import LocalServer  # noqa: PLC0415 - needs grpcio

    return LocalServer(executable)


def external_models(address: str, source: ModelSource) -> Models:
    """Return the models of the TensorFlow Serving server at `host:port`; it is first asked when a model is."""
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
    except ModuleNotFoundError:  # of the package that it would be in
        return False
