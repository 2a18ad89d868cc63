"""Models of any format, for `type: model`: each is loaded by the loader of the format that its files have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cortex.models.loader import LoadRequest, ModelLoader
from cortex.predictor.clients import python
from cortex.predictor.estimators.loader import EstimatorLoader, RunnableModel

if TYPE_CHECKING:
    from cortex.predictor.clients.python import ClientSpec


class DetectedLoader:
    """The `ModelLoader` of models whose format is detected. Thread-safe."""

    def __init__(self, spec: ClientSpec, count: int) -> None:
        """Prepare loaders for about `count` models."""
        self._spec = spec
        self._threads = python.choose_threads(len(spec.sockets), count)
        self._loaders: dict[str, ModelLoader[Any]] = {}
        self._stops: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        others = {"onnx": self._load_onnx, "tensorflow": self._load_tensorflow}
        self._estimators = EstimatorLoader(spec.trusts_pickle, self._threads, others)

    def load(self, request: LoadRequest) -> RunnableModel:
        """Detect and load the model in `request.path`. Raises: ModelError."""
        return self._estimators.load(request)

    def unload(self, model: Any) -> None:
        """Release the resources of a model."""
        self._loaders.get(model.signature.platform, self._estimators).unload(model)

    def close(self) -> None:
        """Stop the processes of backends."""
        for stop in self._stops:
            stop()

    def _load_onnx(self, request: LoadRequest) -> RunnableModel:
        from cortex.predictor.clients import onnx  # noqa: PLC0415 - needs onnxruntime

        with self._lock:
            platform = "onnxruntime_onnx"
            if platform not in self._loaders:
                self._loaders[platform] = onnx.OnnxLoader(bool(self._spec.gpu_ids), self._threads)
        loaded: RunnableModel = self._loaders[platform].load(request)
        return loaded

    def _load_tensorflow(self, request: LoadRequest) -> RunnableModel:
        from cortex.predictor.clients import tensorflow  # noqa: PLC0415 - needs numpy

        with self._lock:
            platform = "tensorflow_savedmodel"
            if platform not in self._loaders:
                backend = python.choose_backend(self._spec.tensorflow_serving)
                self._stops.append(backend.close)
                self._loaders[platform] = tensorflow.TensorFlowLoader(backend)
        loaded: RunnableModel = self._loaders[platform].load(request)
        return loaded
