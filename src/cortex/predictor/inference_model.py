"""Models that the Open Inference Protocol offers: named arrays in, named arrays out."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cortex.payloads.signature import ModelSignature

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]


class InferenceModel(Protocol):
    """A model of an API. Any number of threads use it at once.

    Texts and bytes (`BYTES`) are arrays of objects: inputs have elements of type `bytes`, outputs may also have `str`.
    """

    def signature(self, version: str | None = None) -> ModelSignature:
        """Return the tensors of a version; None: the newest. Without inputs, any are accepted.

        Raises: KeyError for an unknown version.
        """

    def versions(self) -> tuple[str, ...]:
        """Return the versions that may be requested, the newest last; empty if the model has none."""

    def infer(self, inputs: Arrays, version: str | None, outputs: Sequence[str]) -> Arrays | Awaitable[Arrays]:
        """Return at least the requested outputs; all if none is requested.

        The names, datatypes and shapes of the inputs match the signature.
        Raises: KeyError for an unknown version, V2Error with a message for callers; other errors are answered with 500.
        """
