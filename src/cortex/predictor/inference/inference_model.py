"""Models that the Open Inference Protocol offers: named arrays in, named arrays out."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cortex.errors import UserError, with_article
from cortex.models.loaded_models import with_call_scope
from cortex.payloads.signature import ModelSignature
from cortex.predictor.binding import Kind, call_kind
from cortex.predictor.interface import HANDLE_V2, Signature
from cortex.predictor.interface_rules import declared_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

#: The name of the output of a method that returns an array alone.
ONLY_OUTPUT = "output"


class InferenceModel(Protocol):
    """A model of an API. Any number of threads use it at once.

    Texts and bytes (`BYTES`) are arrays of objects, with elements of type `bytes` or `str`.
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


class MethodModel:
    """The `handle_v2` method of a class as an inference model, which accepts any inputs and has no versions."""

    def __init__(self, name: str, method: Any, signature: Signature, in_scope: bool) -> None:
        """Bind a method; with `in_scope`, models that a call uses stay loaded until it returns. Raises: UserError."""
        if importlib.util.find_spec("numpy") is None:
            raise UserError(
                f"{HANDLE_V2}() receives arrays of numpy, which is not installed: add it to requirements.txt"
            )
        self.name = HANDLE_V2
        self.kind: Kind = call_kind(method)
        if self.kind in ("generator", "async_generator"):
            raise UserError(f"{HANDLE_V2}() yields; return a dict of arrays instead")
        self._signature = ModelSignature(name, "python", (), ())
        self._takes_parameters = "parameters" in declared_names(method, signature)
        self._call: Callable[..., Any] = with_call_scope(method) if in_scope else method

    def signature(self, version: str | None = None) -> ModelSignature:
        """Return a signature without tensors. Raises: KeyError for any version."""
        if version is not None:
            raise KeyError(version)
        return self._signature

    def versions(self) -> tuple[str, ...]:
        """Return no versions."""
        return ()

    def infer(self, inputs: Arrays, version: str | None, outputs: Sequence[str]) -> Arrays | Awaitable[Arrays]:
        """Call the method without parameters; see `InferenceModel`."""
        return self.call(inputs, {})

    def call(self, inputs: Arrays, parameters: Mapping[str, Any]) -> Arrays | Awaitable[Arrays]:
        """Call the method, with the parameters of the request if it declares them. Raises: UserError."""
        arguments: dict[str, Any] = {"inputs": inputs}
        if self._takes_parameters:
            arguments["parameters"] = parameters
        if self.kind == "async":
            return self._await(self._call(**arguments))
        return _outputs(self._call(**arguments))

    async def _await(self, result: Awaitable[Any]) -> Arrays:
        return _outputs(await result)


def _outputs(result: Any) -> Arrays:
    if isinstance(result, Mapping):
        return result
    if hasattr(result, "__array__"):
        return {ONLY_OUTPUT: result}
    raise UserError(
        f"{HANDLE_V2}() returned {with_article(type(result).__name__)}; return a dict of arrays, or an array"
    )
