"""Client of Python models, `python_client` and `model_client`: the user's `load_model` loads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from cortex.errors import ModelError
from cortex.models.loader import LoadRequest
from cortex.models.registry import Registry
from cortex.predictor.interface import LOAD_MODEL
from cortex.predictor.tracebacks import user_code


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
