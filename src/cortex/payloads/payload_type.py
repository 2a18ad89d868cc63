"""The type of a payload: reads a body, in whatever form it arrives, as what the user's method annotates."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Final

from cortex.payloads.json_object import Json
from cortex.payloads.signature import BodySignature
from cortex.payloads.validation import PLACE, PayloadError, payload_error

JSON_TYPE: Final = "application/json"
TEXT_TYPE: Final = "text/plain"
BYTES_TYPE: Final = "application/octet-stream"
TEXT_SCHEMA: Final[Json] = {"type": "string"}
BYTES_SCHEMA: Final[Json] = {"type": "string", "format": "binary"}

_REQUIRED: Final = object()


class PayloadType(ABC):
    """Base of the types of payloads: a type whose values are JSON only.

    All methods raise PayloadError for a value that is not of this type.
    """

    #: The payload is the body itself, whatever its content type.
    is_raw = False
    #: The payload is a form as it is, also one that looks like JSON.
    is_form = False
    #: Bodies that are neither JSON nor a multipart form are read by `from_bytes`; otherwise they must be JSON.
    reads_bytes = False
    media_type = JSON_TYPE
    #: Bodies of other media types that are read, too.
    alternatives: tuple[BodySignature, ...] = ()
    #: Content type of a result of this type.
    result_media_type = JSON_TYPE

    def __init__(self, schema: Json, result_schema: Json | None = None) -> None:
        """Set the JSON Schemas (2020-12, with their own `$defs`) of payloads and of results, by default the same."""
        self.schema = schema
        self.result_schema = schema if result_schema is None else result_schema
        self._default: Any = _REQUIRED
        self._is_required = True

    @property
    def signature(self) -> BodySignature:
        """Return what the body has to be."""
        return BodySignature(self.schema, self.media_type, True, self._is_required, self.alternatives)

    @property
    def result_signature(self) -> BodySignature:
        """Return what the body of a response is."""
        return BodySignature(self.result_schema, self.result_media_type, is_typed=True)

    def set_default(self, value: Any) -> None:
        """Set the payload of an empty body."""
        self._default = value
        self._is_required = False

    def is_none(self, value: Any) -> bool:
        """Return whether a JSON value is null, where the type allows it."""
        return value is None and self._default is None

    @abstractmethod
    def from_json(self, value: Any, text: bytes) -> Any:
        """Convert a JSON value; `text` is the JSON that it was parsed from."""

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        """Convert a body that is neither JSON nor a multipart form; called only if `reads_bytes`."""
        raise payload_error("json", "Input should be JSON")

    def from_form(self, form: Any) -> Any:
        """Convert starlette's `FormData`."""
        raise payload_error("form", "Input should not be a form")

    def from_nothing(self) -> Any:
        """Return the payload of an empty body."""
        if self._default is _REQUIRED:
            raise payload_error("missing", "the body is empty")
        return self._default


class ObjectType(PayloadType):
    """`dict`: any JSON object, or the fields of a form."""

    def from_json(self, value: Any, text: bytes) -> Any:
        return value if isinstance(value, dict) or self.is_none(value) else _refuse("dict_type", "dictionary")

    def from_form(self, form: Any) -> Any:
        return fields_of(form)


class FormType(PayloadType):
    """Starlette's `FormData`: a form as it is."""

    is_form = reads_bytes = True
    media_type = "multipart/form-data"
    alternatives = (BodySignature({"type": "object"}, "application/x-www-form-urlencoded", is_typed=True),)

    def __init__(self) -> None:
        super().__init__({"type": "object"})

    def from_json(self, value: Any, text: bytes) -> Any:
        return None if self.is_none(value) else self.from_bytes(text, JSON_TYPE)

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        types = "multipart/form-data or application/x-www-form-urlencoded"
        raise payload_error("form_type", f"Input should be a form: {types}")

    def from_form(self, form: Any) -> Any:
        return form


class FormUnionType(PayloadType):
    """A union of a form, or of a file in a form, with what other bodies are."""

    def __init__(self, form_type: PayloadType, other: PayloadType) -> None:
        super().__init__(other.schema)
        self.media_type = other.media_type
        form = form_type.signature
        of_form = replace(form, alternatives=()), *form.alternatives
        self.alternatives = (*other.alternatives, *of_form)
        self.reads_bytes = other.reads_bytes
        self.is_form = form_type.is_form and other.reads_bytes  # otherwise `curl -d` may send JSON as a form
        self._default, self._is_required = other._default, other._is_required
        self._form_type = form_type
        self._other = other

    def set_default(self, value: Any) -> None:
        super().set_default(value)
        self._other.set_default(value)

    def from_json(self, value: Any, text: bytes) -> Any:
        return self._other.from_json(value, text)

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        return self._other.from_bytes(body, media_type)

    def from_form(self, form: Any) -> Any:
        try:
            return self._form_type.from_form(form)
        except PayloadError:
            with contextlib.suppress(PayloadError):
                return self._other.from_form(form)
            raise


class ListType(PayloadType):
    """`list`: any JSON array."""

    def from_json(self, value: Any, text: bytes) -> Any:
        return value if isinstance(value, list) or self.is_none(value) else _refuse("list_type", "list")


class TextType(PayloadType):
    """`str`: a text, or a JSON string."""

    reads_bytes = True
    media_type = result_media_type = TEXT_TYPE
    alternatives = (BodySignature(TEXT_SCHEMA, is_typed=True),)

    def __init__(self, schema: Json) -> None:
        super().__init__(schema)
        self._default, self._is_required = "", False  # a text may be empty

    def from_json(self, value: Any, text: bytes) -> Any:
        return value if isinstance(value, str) or self.is_none(value) else _refuse("string_type", "string")

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        try:
            return body.decode()
        except UnicodeDecodeError:
            raise payload_error("string_unicode", "Input should be a text in UTF-8") from None


class BytesType(PayloadType):
    """`bytes`: the body."""

    is_raw = reads_bytes = True
    media_type = result_media_type = BYTES_TYPE

    def __init__(self, schema: Json) -> None:
        super().__init__(schema)
        self._default, self._is_required = b"", False

    def from_json(self, value: Any, text: bytes) -> Any:
        return text

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        return body


def fields_of(form: Any) -> dict[str, Any]:
    """Return the fields of a form as a JSON object; one that occurs more than once is a list."""
    values = {name: form.getlist(name) for name in form}
    return {name: found[0] if len(found) == 1 else found for name, found in values.items()}


def _refuse(kind: str, wanted: str) -> Any:
    raise payload_error(kind, f"Input should be a valid {wanted}")


class Part:
    """Metadata that lets pydantic read a part of a type as an array, frame or image, which it does not know."""

    def __init__(self, part: PayloadType) -> None:
        self._part = part

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema  # noqa: PLC0415 - only pydantic calls this

        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> Json:
        return dict(self._part.result_schema if handler.mode == "serialization" else self._part.schema)

    def _read(self, value: Any) -> Any:
        from pydantic_core import PydanticCustomError  # noqa: PLC0415 - as above

        try:
            return self._part.from_json(value, b"")
        except PayloadError as error:
            (problem,) = error.detail
            place = problem["loc"][1:]
            raise PydanticCustomError(problem["type"], problem["msg"], {PLACE: place} if place else None) from None
