"""Choose what runs TensorFlow models: TensorFlow in this process, a server that this process starts, or another one."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING, Any

from cortex.errors import ModelError
from cortex.models.spec import ModelSource

if TYPE_CHECKING:
    from cortex.predictor.clients.tensorflow import TensorFlowBackend
    from cortex.predictor.clients.tensorflow_serving import ExternalModels

#: The value of `tensorflow_serving` in a configuration that starts a server for each process.
LOCAL = "local"
SERVER = "tensorflow_model_server"
_GRPC = {"grpc": "grpcio", "google.protobuf": "protobuf"}


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
