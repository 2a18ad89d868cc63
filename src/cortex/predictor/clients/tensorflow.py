"""Runs SavedModels with TensorFlow in this process: the only module that imports it, and not before the first model.

Each model has a session and a graph of its own, as in TensorFlow Serving: the same loader for exports of TensorFlow 1
and 2, and all that a model took goes when its session is closed. It must not know users' values, only arrays.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from cortex.errors import ModelError
from cortex.models.loader import LoadRequest
from cortex.predictor.clients.servable import SignatureInfo, named, plain, read_signature
from cortex.predictor.clients.tensors import DTYPES, Array

#: For TensorFlow, unless the user's environment says otherwise. Models of one GPU share its memory only if each takes
#: no more than it needs; of its logs, warnings and errors are of use. oneDNN's allocator never returns memory; the
#: C library's is as fast. The number of threads is left to the user.
_ENVIRONMENT = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}
#: The tag of the graph that exporters mean to be served; there may be others, for training.
_SERVE = "serve"
_BFLOAT16 = 14
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_IMPORT_NOISE = ("oneDNN custom operations are on", "All log messages before absl::InitializeLog")
_SIEVE_TIMEOUT_S = 1.0

_import_turn = threading.Lock()


class EmbeddedTensorFlow:
    """The backend; any thread may call it."""

    def load(self, request: LoadRequest) -> EmbeddedModel:
        """Load a SavedModel. Raises: ModelError."""
        tf = _import_tensorflow()
        graph = tf.Graph()
        session = tf.compat.v1.Session(graph=graph, config=_session_config(tf))
        try:
            with graph.as_default(), _without_deprecations(tf):
                meta = tf.compat.v1.saved_model.loader.load(session, [_SERVE], request.path)
            return EmbeddedModel(request, session, meta.signature_def)
        except (tf.errors.OpError, OSError, ValueError, RuntimeError, TypeError, KeyError) as e:
            session.close()
            raise ModelError(f"TensorFlow can't load it: {plain(e)}") from e
        except BaseException:
            session.close()
            raise

    def unload(self, model: EmbeddedModel) -> None:
        """Close the model's session, with which its variables and tables go, and drop its graph with its constants."""
        model.close()
        gc.collect()  # graphs are full of cycles

    def close(self) -> None:
        """Nothing was started."""


class EmbeddedModel:
    """A SavedModel in a session of its own."""

    def __init__(self, request: LoadRequest, session: Any, signature_defs: Mapping[str, Any]) -> None:
        self._request = request
        self._session = session
        self.signatures = {key: read_signature(value) for key, value in signature_defs.items()}
        self._calls: dict[str, Callable[[Mapping[str, Array]], dict[str, Array]]] = {}
        self._turn = threading.Lock()
        self._running = 0
        self._is_closing = False
        self._op_error: type[Exception] = _import_tensorflow().errors.OpError

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature. Raises: ModelError with TensorFlow's words."""
        with self._turn:
            if self._is_closing:
                raise ModelError(f"{named(self._request)} has been unloaded")
            call = self._calls.get(signature_key)
            if call is None:
                call = self._calls[signature_key] = self._prepare(self.signatures[signature_key])
            self._running += 1
        try:
            return call(inputs)
        except self._op_error as e:
            raise ModelError(f"{named(self._request)} failed: {plain(e)}") from None
        finally:
            with self._turn:
                self._running -= 1
                self._close_if_idle()

    def close(self) -> None:
        """Release what it holds, once the calls inside have ended; it can't be run any more."""
        with self._turn:
            self._is_closing = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_closing and not self._running and self._session is not None:
            self._calls.clear()
            self._session.close()
            self._session = None

    def _prepare(self, signature: SignatureInfo) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Bind a call to its tensors once: `Session.run` would look them up by name each time."""
        fed = {spec.tensor: name for name, spec in signature.inputs.items()}
        # TensorFlow refuses to be asked for what it is given.
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
    with _import_turn:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        is_first = "tensorflow" not in sys.modules
        try:
            with _without_noise(is_first and _ONEDNN not in os.environ):
                import tensorflow  # noqa: PLC0415 - optional, and takes seconds
        except ImportError as e:
            raise ModelError(f"TensorFlow can't be imported: {e}") from e
        if is_first:
            # Of its half a million objects none ever goes, yet each collection would walk them all: for 0.6 s, in
            # which nothing else runs.
            gc.collect()
            gc.freeze()
    return tensorflow


@contextmanager
def _without_noise(wanted: bool) -> Iterator[None]:
    """Keep from the user's log that oneDNN is used, which is said before TensorFlow reads what is to be logged.

    What is written to stderr meanwhile passes through another process, so that the last words of an import that ends
    this one are not lost.
    """
    try:
        command = ["sed", "-u", *(f"--expression=/{text}/d" for text in _IMPORT_NOISE)]
        sieve = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2) if wanted else None
    except OSError:
        sieve = None
    if sieve is None or sieve.stdin is None:
        yield
        return
    kept = os.dup(2)
    os.dup2(sieve.stdin.fileno(), 2)
    sieve.stdin.close()
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        with suppress(subprocess.TimeoutExpired):  # where another thread has started a process that holds it open
            sieve.wait(_SIEVE_TIMEOUT_S)


def _session_config(tf: Any) -> Any:
    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    config.gpu_options.allow_growth = os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    return config


@contextmanager
def _without_deprecations(tf: Any) -> Iterator[None]:
    """Hide from the user's log that the loader of sessions is called deprecated."""

    def keep(record: logging.LogRecord) -> bool:
        return "deprecat" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _array(value: Any, dtype: int) -> Array:
    if isinstance(value, bytes):  # how a session returns a single string; numpy would strip its trailing zeros
        array = np.empty((), np.object_)
        array[()] = value
        return array
    return np.asarray(value, DTYPES[dtype].numpy) if dtype == _BFLOAT16 else np.asarray(value)
