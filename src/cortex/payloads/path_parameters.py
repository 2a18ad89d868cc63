"""The parameters of paths: from the text in the path to the type that the user's argument annotates."""

from __future__ import annotations

import inspect
from typing import Any

from cortex.payloads.path_template import decode_value
from cortex.payloads.signature import Json, ParameterSignature
from cortex.payloads.validation import PayloadError, from_pydantic

_TEXTS = (inspect.Parameter.empty, str, Any, object)


class PathParameter:
    """A parameter of a path."""

    def __init__(self, name: str, annotation: Any) -> None:
        """Prepare the conversion. Raises: what pydantic raises for annotations that it can't read."""
        self.name = name
        self._adapter: Any = None
        schema: Json = {"type": "string"}
        if not any(annotation is each for each in _TEXTS):
            from pydantic import TypeAdapter  # noqa: PLC0415 - only for parameters with other types

            self._adapter = TypeAdapter(annotation)
            schema = self._adapter.json_schema()
        self.signature = ParameterSignature(name, schema)

    def convert(self, value: str) -> Any:
        """Return the argument for a value as it was sent. Raises: PayloadError."""
        try:
            text = decode_value(value)
        except UnicodeDecodeError:
            message = "Input should be a text in UTF-8"
            detail = {"type": "string_unicode", "loc": ["path", self.name], "msg": message}
            raise PayloadError(f"{self.name}: {message}", [detail]) from None
        if self._adapter is None:
            return text
        from pydantic import ValidationError  # noqa: PLC0415 - imported already

        try:
            return self._adapter.validator.validate_strings(text)
        except ValidationError as error:
            raise from_pydantic(error, text, self.name, ("path", self.name)) from None
