"""The models of an API without code, by name: what requests and the Open Inference Protocol run.

A version is loaded when it is asked for the first time, or before the API serves: that is the registry's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cortex.errors import ModelError, ModelInputError
from cortex.models.loaded_models import ensure_call_scope
from cortex.models.registry import Registry
from cortex.models.spec import DEFAULT_MODEL, LATEST, ModelSource
from cortex.payloads.inference_protocol import V2Error, model_document
from cortex.payloads.signature import ModelSignature

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cortex.predictor.estimators.loader import RunnableModel

    Arrays = Mapping[str, NDArray[Any]]


class RegistryModel:
    """One model of an API, an `InferenceModel`."""

    def __init__(self, name: str, key: str, registry: Registry[RunnableModel]) -> None:
        """`key` is the model's name in the registry."""
        self.name = name
        self.key = key
        self._registry = registry
        #: The signature of the version that was requested last, and the same with the name of this model.
        self._named: tuple[ModelSignature, ModelSignature] | None = None

    def signature(self, version: str | None = None) -> ModelSignature:
        """Return the tensors of a version; None: the newest. Raises: KeyError for an unknown version; ModelError."""
        with ensure_call_scope():
            found = self.load(version).signature
        named = self._named
        if named is None or named[0] is not found:
            self._named = named = (found, replace(found, name=self.name))
        return named[1]

    def versions(self) -> tuple[str, ...]:
        """Return the versions that exist, the newest last."""
        model = self._registry.models.get(self.key)
        return () if model is None else tuple(version.number for version in model.versions)

    def infer(self, inputs: Arrays, version: str | None, outputs: Sequence[str] = ()) -> Arrays:
        """Return at least the requested outputs; all if none is requested.

        Raises: KeyError for an unknown version; V2Error if the model rejects the inputs; ModelError.
        """
        with ensure_call_scope():
            try:
                return self.load(version).infer(inputs, outputs)
            except (ValueError, ModelInputError) as error:
                raise V2Error(400, str(error)) from error

    def load(self, version: str | None) -> RunnableModel:
        """Return a version; None: the newest. Raises: KeyError for an unknown version; ModelError."""
        if version is not None:
            try:
                self._registry.find(self.key, version)
            except ModelError as error:
                raise KeyError(f"{self.name} has no version {version}; it has {', '.join(self.versions())}") from error
        return self._registry.get(self.key, LATEST if version is None else version)


class RegistryModels(Mapping[str, RegistryModel]):
    """The models of an API by name; a single one has the name of the API."""

    def __init__(self, api: str, source: ModelSource, registry: Registry[RunnableModel]) -> None:
        self._only = RegistryModel(api, DEFAULT_MODEL, registry) if source.form == "path" else None
        self._registry = registry

    def __getitem__(self, name: str) -> RegistryModel:
        if self._only is not None:
            if name == self._only.name:
                return self._only
        elif name in self._registry.models:
            return RegistryModel(name, name, self._registry)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.models if self._only is None else (self._only.name,))

    def __len__(self) -> int:
        return len(self._registry.models) if self._only is None else 1

    def describe(self) -> list[dict[str, Any]]:
        """Return what a GET shows of each model: its format and why, its inputs and outputs, its versions."""
        loaded = {key: entry["loaded"] for key, entry in self._registry.describe().items()}
        return [_describe(model, loaded.get(model.key, ())) for model in self.values()]


def _describe(model: RegistryModel, loaded: Sequence[str]) -> dict[str, Any]:
    described = {"name": model.name, "versions": list(model.versions())}
    if not loaded:  # with caching, before its first request
        return described
    signature = model.signature(loaded[-1])
    document = model_document(model.name, signature, ())
    tensors = {side: document[side] for side in ("inputs", "outputs")}
    return {**described, "platform": signature.platform, "found": signature.description, **tensors}
