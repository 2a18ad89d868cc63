"""Run SavedModels with TensorFlow in this process.

This is the only module that imports TensorFlow, when it loads the first model. Each model has its own session and
graph, as in TensorFlow Serving: one loader serves exports of TensorFlow 1 and 2, and closing the session releases all
resources of the model.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cortex.errors import ModelError, ModelInputError
from cortex.models.loader import LoadRequest
from cortex.payloads.arrays import Array
from cortex.predictor.clients.tensorflow import SignatureInfo, clean_message, read_signature
from cortex.predictor.clients.tensors import DTYPES

#: Defaults of environment variables. Processes can share a GPU only if its memory is allocated on demand. Level 1 logs
#: warnings and errors. oneDNN's allocator never returns memory; that of the C library is as fast. The number of threads
#: is left to the user.
_ENVIRONMENT = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}
#: The tag of the graph for serving; exports may contain others, for training.
_SERVE = "serve"
_BFLOAT16 = 14

_import_lock = threading.Lock()


class EmbeddedTensorFlow:
    """The backend that runs models with TensorFlow in this process. Thread-safe."""

    def load(self, request: LoadRequest) -> EmbeddedModel:
        """Load a SavedModel. Raises: ModelError."""
        tf = _import_tensorflow()
        graph = tf.Graph()
        session = tf.compat.v1.Session(graph=graph, config=_session_config(tf))
        try:
            with graph.as_default():
                meta = tf.compat.v1.saved_model.loader.load(session, [_SERVE], request.path)
            return EmbeddedModel(request, session, meta.signature_def)
        except (tf.errors.OpError, OSError, ValueError, RuntimeError, TypeError, KeyError) as e:
            session.close()
            raise ModelError(f"TensorFlow can't load the model: {clean_message(e)}") from e
        except BaseException:
            session.close()
            raise

    def unload(self, model: EmbeddedModel) -> None:
        """Close the session of a model, which frees variables and tables, and its graph, which frees constants."""
        model.close()
        gc.collect()  # graphs contain reference cycles

    def close(self) -> None:
        """Do nothing: this backend has no processes."""


class EmbeddedModel:
    """A SavedModel with its own session."""

    def __init__(self, request: LoadRequest, session: Any, signature_defs: Mapping[str, Any]) -> None:
        self._request = request
        self._session = session
        self.signatures = {key: read_signature(value) for key, value in signature_defs.items()}
        self._calls: dict[str, Callable[[Mapping[str, Array]], dict[str, Array]]] = {}
        self._lock = threading.Lock()
        self._running = 0
        self._is_closing = False
        self._op_error: type[Exception] = _import_tensorflow().errors.OpError

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature. Raises: ModelError with the message of TensorFlow."""
        with self._lock:
            if self._is_closing:
                raise ModelError(f"{self._request.label} has been unloaded")
            call = self._calls.get(signature_key)
            if call is None:
                call = self._calls[signature_key] = self._prepare(self.signatures[signature_key])
            self._running += 1
        try:
            return call(inputs)
        except self._op_error as e:
            failure = ModelInputError if type(e).__name__ == "InvalidArgumentError" else ModelError
            raise failure(f"{self._request.label} failed: {clean_message(e)}") from None
        finally:
            with self._lock:
                self._running -= 1
                self._close_if_idle()

    def close(self) -> None:
        """Refuse new calls, and close the session when running calls have returned."""
        with self._lock:
            self._is_closing = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_closing and not self._running and self._session is not None:
            self._calls.clear()
            self._session.close()
            self._session = None

    def _prepare(self, signature: SignatureInfo) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Bind a call to its tensors once; `Session.run` would look them up by name each time."""
        fed = {spec.tensor: name for name, spec in signature.inputs.items()}
        # TensorFlow can't fetch a tensor that is fed.
        passed = {name: fed[spec.tensor] for name, spec in signature.outputs.items() if spec.tensor in fed}
        fetched = {name: spec for name, spec in signature.outputs.items() if name not in passed}
        graph = self._session.graph
        run = self._session.make_callable(
            [graph.as_graph_element(spec.tensor) for spec in fetched.values()],
            [graph.as_graph_element(tensor) for tensor in fed],
        )
        dtypes = [graph.as_graph_element(tensor).dtype.as_numpy_dtype for tensor in fed]
        narrow = [signature.inputs[name].dtype == _BFLOAT16 for name in fed.values()]

        def call(inputs: Mapping[str, Array]) -> dict[str, Array]:
            arrays: Sequence[Array] = [inputs[name] for name in fed.values()]
            if any(narrow):
                arrays = [a.astype(d) if n else a for a, d, n in zip(arrays, dtypes, narrow, strict=True)]
            outputs = {
                name: _array(value, spec.dtype)
                for (name, spec), value in zip(fetched.items(), run(*arrays), strict=True)
            }
            return {**outputs, **{name: inputs[source] for name, source in passed.items()}} if passed else outputs

        return call


def _import_tensorflow() -> Any:
    with _import_lock:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        is_first = "tensorflow" not in sys.modules
        try:
            import tensorflow  # noqa: PLC0415 - optional, and takes seconds
        except ImportError as e:
            raise ModelError(f"TensorFlow can't be imported: {e}") from e
        if is_first:
            # TensorFlow's half a million objects live forever. Without freeze(), each full collection would traverse
            # them, which stops all threads for 0.6 s.
            gc.collect()
            gc.freeze()
    return tensorflow


def _session_config(tf: Any) -> Any:
    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    config.gpu_options.allow_growth = os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    return config


def _array(value: Any, dtype: int) -> Array:
    if isinstance(value, bytes):  # a scalar string; numpy would strip its trailing zero bytes
        array = np.empty((), np.object_)
        array[()] = value
        return array
    return np.asarray(value, DTYPES[dtype].numpy) if dtype == _BFLOAT16 else np.asarray(value)
