"""Models with a request handler: two optional functions of the user around a model, the interface of 0.8 to 0.11.

The data goes through these steps:

    sample ── pre_inference ──► prepared sample ── model ──► prediction ── post_inference ──► response
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cortex.errors import ModelInputError
from cortex.payloads.signature import BodySignature, MethodSignature
from cortex.predictor.binding import Bodies, BoundMethod
from cortex.predictor.interface import POST_INFERENCE, PRE_INFERENCE

if TYPE_CHECKING:
    from cortex.models.registry import Registry

#: The name of the method in messages and signatures.
_NAME = "predict"
Function = Callable[..., Any]


class RequestHandler:
    """A model of an API and the functions around it. Thread-safe if the functions are."""

    def __init__(self, functions: Mapping[str, Function], metadata: tuple[Any, ...], models: Registry[Any]) -> None:
        """Use those of `functions` that the user defines; `metadata` are their arguments after the signature."""
        self._prepare = functions.get(PRE_INFERENCE)
        self._finish = functions.get(POST_INFERENCE)
        self._metadata = metadata
        self._models = models

    def bind(self) -> BoundMethod:
        """Return the method for POST, whose payload is JSON or None."""
        return BoundMethod(
            name=_NAME,
            arguments=("sample",),
            needs_payload=True,
            needs_query_params=False,
            needs_headers=False,
            kind="sync",
            call=lambda payload, query_params, headers: self.predict(payload),
            bodies=Bodies.JSON_ONLY,
            traced=self.predict,
            signature=MethodSignature("POST", _NAME, BodySignature(), BodySignature()),
        )

    def predict(self, sample: Any, report: Callable[[str, Any], None] = lambda name, value: None) -> Any:
        """Run the functions and the model; `report` receives the result of each step.

        Raises: HTTPException 400 if the model rejects the caller's own sample; ModelError.
        """
        model = self._models.get()
        of_inputs, of_outputs = model.handler_signatures
        value = sample if self._prepare is None else self._prepare(sample, of_inputs, *self._metadata)
        report(PRE_INFERENCE, value)
        try:
            value = model.predict(value)
        except ModelInputError as error:
            if self._prepare is not None:
                raise
            raise _rejected(sample, error) from None
        report("inference", value)
        if self._finish is not None:
            value = self._finish(value, of_outputs, *self._metadata)
        report(POST_INFERENCE, value)
        return value

    def describe(self) -> dict[str, Any]:
        """Return the shape and type of each input of the model."""
        inputs: dict[str, Any] = self._models.get().input_signatures
        return inputs


def _rejected(sample: Any, error: ModelInputError) -> Exception:
    from starlette.exceptions import HTTPException  # noqa: PLC0415 - slow to import, and few requests need it

    hint = "; send JSON with the header `content-type: application/json`" if sample is None else ""
    return HTTPException(400, f"{error}{hint}")
