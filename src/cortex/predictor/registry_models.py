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
from cortex.models.spec import LATEST, ModelSource
from cortex.payloads.inference_protocol import V2Error
from cortex.payloads.signature import ModelSignature

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cortex.predictor.estimators.loader import RunnableModel

    Arrays = Mapping[str, NDArray[Any]]


class RegistryModel:
    """One model of an API, an `InferenceModel`."""

    def __init__(self, name: str, key: str | None, registry: Registry[RunnableModel]) -> None:
        """`key` is the model's name in the registry; None: its only one."""
        self.name = name
        self._key = key
        self._registry = registry

    def signature(self, version: str | None = None) -> ModelSignature:
        """Return the tensors of a version; None: the newest. Raises: KeyError for an unknown version; ModelError."""
        with ensure_call_scope():
            return replace(self.load(version).signature, name=self.name)

    def versions(self) -> tuple[str, ...]:
        """Return the versions that exist, the newest last."""
        return tuple(self._described()["versions"])

    def loaded_versions(self) -> tuple[str, ...]:
        """Return the versions that are in memory."""
        return tuple(self._described()["loaded"])

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
                self._registry.find(self._key, version)
            except ModelError as error:
                raise KeyError(f"{self.name} has no version {version}; it has {', '.join(self.versions())}") from error
        return self._registry.get(self._key, LATEST if version is None else version)

    def _described(self) -> Mapping[str, Any]:
        described = self._registry.describe()
        return next(iter(described.values())) if self._key is None else described[self._key]


class RegistryModels(Mapping[str, RegistryModel]):
    """The models of an API by name; a single one has the name of the API."""

    def __init__(self, api: str, source: ModelSource, registry: Registry[RunnableModel]) -> None:
        self._only = RegistryModel(api, None, registry) if source.form == "path" else None
        self._registry = registry

    def __getitem__(self, name: str) -> RegistryModel:
        if self._only is not None:
            if name == self._only.name:
                return self._only
        elif name in self._registry.describe():
            return RegistryModel(name, name, self._registry)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.describe() if self._only is None else (self._only.name,))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def describe(self) -> list[dict[str, Any]]:
        """Return what a GET shows of each model: its format and why, its inputs and outputs, its versions."""
        return [_describe(model) for model in self.values()]


def _describe(model: RegistryModel) -> dict[str, Any]:
    described = {"name": model.name, "versions": list(model.versions())}
    loaded = model.loaded_versions()
    if not loaded:  # with caching, before its first request
        return described
    signature = model.signature(loaded[-1])
    tensors = {
        side: [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in side_tensors]
        for side, side_tensors in (("inputs", signature.inputs), ("outputs", signature.outputs))
    }
    return {**described, "platform": signature.platform, "found": signature.description, **tensors}
