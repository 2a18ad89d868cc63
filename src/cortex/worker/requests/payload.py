"""Bodies: parse the body of a request into a payload, encode a result of user code into a body.

The fast path is one call of orjson. Values that orjson rejects (numpy values, integers beyond 64 bits, other keys than
strings) take a slow path, which either converts them or names the value that JSON cannot hold. numpy and starlette are
slow to import: numpy is never imported here, starlette only once a request or a result needs it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from datetime import date, datetime, time, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_to_bytes, urlencode
from uuid import UUID

import orjson

from cortex.errors import UserError, type_name
from cortex.payloads.content_type import FORM, UTF8, charset_of, decode_text, is_json, media_type_of, to_utf8
from cortex.payloads.json_bodies import UTF8_BOM, parse_json, read_json
from cortex.payloads.payload_type import PayloadType
from cortex.payloads.validation import BadBody
from cortex.predictor.binding import Bodies
from cortex.worker.http.responses import NO_HEADERS, Header, ValidHeaders, validate_head

if TYPE_CHECKING:
    from starlette.datastructures import FormData, Headers, QueryParams
    from starlette.responses import Response

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
BYTES = b"application/octet-stream"
JSON_LINES = b"application/x-ndjson"
PNG = b"image/png"
CONTENT_TYPE = b"content-type"

#: Maximum number of parts of a form, against attacks on the parser.
MAX_FORM_PARTS = 1000

_MULTIPART = b"multipart/form"
_NOT_JSON = object()

_KEYS = orjson.OPT_NON_STR_KEYS

#: Advice for types that JSON cannot hold, by `<top-level module>.<type name>`.
_FIXES = {
    "builtins.set": "return a list: list(value)",
    "builtins.frozenset": "return a list: list(value)",
    "builtins.bytes": "decode it, or encode it with base64",
    "builtins.complex": "return its real and imaginary parts",
    "torch.Tensor": "return value.tolist()",
    "tensorflow.EagerTensor": "return value.numpy()",
    "PIL.Image": "save it to bytes and return those",
}
#: Modules whose values become the same texts as in a pydantic model: `Decimal`, `IPv4Address`, `Path`.
_TEXT_MODULES = frozenset(("decimal", "ipaddress", "pathlib"))
_NUMBERS = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
    + ("bool", "bool_")  # numpy 2 and numpy 1
)
_ITEM_LIMIT = 60


class Encoded(NamedTuple):
    """An encoded result. `headers` exclude content-type and content-length, which the connection writes."""

    status: int
    media_type: bytes | None
    body: bytes
    headers: ValidHeaders = NO_HEADERS
    background: Callable[[], Awaitable[None]] | None = None  #: runs after the response is sent
    response: Response | None = None  #: a starlette response that sends its own body: see `streaming.open_response`


#: Bypasses the Python-level constructor of Encoded, which takes as long as encoding a small result.
_new_encoded = tuple.__new__


def parse(content_type: bytes | None, body: bytes, bodies: Bodies = Bodies.BY_TYPE) -> Any:
    """Parse a body by its content type into JSON, FormData, str or bytes. Raises: BadBody, PayloadError."""
    if content_type == JSON:
        return read_json(body)
    content_type = content_type or b""
    kind = media_type_of(content_type)
    # Classes of older generations have always received `application/problem+json` as bytes.
    if kind == JSON or (bodies is Bodies.JSON_OVER_FORMS and is_json(kind)):
        return read_json(to_utf8(body, content_type))
    if bodies is Bodies.JSON_ONLY:
        return None
    if kind == b"text/plain":
        return decode_text(body, content_type)
    if kind == FORM and bodies is Bodies.JSON_OVER_FORMS:
        value = json_or(to_utf8(body, content_type), _NOT_JSON)
        return value if value is not _NOT_JSON else _parse_form(kind, content_type, body)
    if kind == FORM or kind.startswith(_MULTIPART):
        return _parse_form(kind, content_type, body)
    return body


def parse_typed(payload_type: PayloadType, content_type: bytes | None, body: bytes) -> Any:
    """Parse a body into the type that the user's method annotates. Raises: BadBody, PayloadError.

    JSON needs no content type, because the annotation asks for it.
    """
    if content_type == JSON and body and not payload_type.is_raw:
        return _parse_typed_json(payload_type, body)
    content_type = content_type or b""
    kind = media_type_of(content_type)
    if payload_type.is_raw:
        return body or payload_type.from_nothing()
    is_form = kind.startswith(_MULTIPART) or (kind == FORM and payload_type.is_form)
    if not body and not is_form:
        return payload_type.from_nothing()
    if is_form:
        return payload_type.from_form(_parse_form(kind, content_type, body))
    text = to_utf8(body, content_type)
    if is_json(kind):
        return _parse_typed_json(payload_type, text)
    if payload_type.reads_bytes:
        return payload_type.from_bytes(text, kind.decode("latin-1"))
    # `curl -d` sends JSON as a form; a form itself never begins with a brace or bracket, which are encoded in it.
    if kind == FORM and text.lstrip()[:1] not in (b"{", b"[") and json_or(text, _NOT_JSON) is _NOT_JSON:
        return payload_type.from_form(_parse_form(kind, content_type, body))
    return _parse_typed_json(payload_type, text)


def _parse_typed_json(payload_type: PayloadType, body: bytes) -> Any:
    # First orjson, which refuses what is not JSON in the same words as for other methods: NaN, 1e999.
    return payload_type.from_json(read_json(body), body.removeprefix(UTF8_BOM))


def json_or(body: bytes, otherwise: Any) -> Any:
    """Return the value of a body that is JSON, else `otherwise`."""
    try:
        return read_json(body)
    except BadBody:
        return otherwise


def make_query_params(query: bytes) -> QueryParams:
    """Parse a query string into a multi-dict."""
    from starlette.datastructures import QueryParams  # noqa: PLC0415 - slow to import, and few methods use it

    return QueryParams(query) if query else QueryParams()


def make_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers as a case-insensitive multi-dict."""
    from starlette.datastructures import Headers  # noqa: PLC0415 - as above

    return Headers(raw=[(name.lower(), value) for name, value in raw])


def encode(result: Any, json_strings: bool = False) -> Encoded:
    """Encode a result of user code; with `json_strings`, a str becomes a JSON string instead of plain text.

    numpy scalars and arrays become numbers and lists; NaN and infinities become null; pydantic models become objects,
    frames of pandas lists of records, and images of Pillow PNG.
    Raises: UserError, which names the path of a value that JSON cannot hold.
    """
    kind = type(result)
    if kind is dict or kind is list:
        return _new_encoded(Encoded, (200, JSON, encode_json(result), (), None, None))
    if isinstance(result, str) and not json_strings:
        return Encoded(200, TEXT, _encode_text(result))
    if isinstance(result, bytes | bytearray | memoryview):
        return Encoded(200, BYTES, bytes(result))
    responses = sys.modules.get("starlette.responses")  # if it is not imported, no result can be a response
    if responses is not None and isinstance(result, responses.Response):
        return _encode_response(result, responses.Response)
    images = sys.modules.get("PIL.Image")  # likewise
    if images is not None and isinstance(result, images.Image):
        file = io.BytesIO()
        try:
            result.save(file, "PNG")
        except OSError:  # a mode that PNG does not have, such as CMYK
            result.convert("RGB").save(file, "PNG")
        return Encoded(200, PNG, file.getvalue())
    if isinstance(result, Encoded):
        return result
    return Encoded(200, JSON, encode_json(result))


def encode_json(result: Any) -> bytes:
    """Encode a value as JSON: one call of orjson if possible, the slow way otherwise."""
    try:
        return orjson.dumps(result, _encode_other)
    except TypeError:
        pass  # leave the handler first: exceptions of the slow way must not have this one as context
    return _encode_json_slowly(result)


def encode_chunk(item: Any) -> bytes:
    """Encode one item of a stream: bytes and str unchanged, anything else as a line of JSON."""
    if isinstance(item, str):
        return _encode_text(item)
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    return encode_json(item) + b"\n"


def stream_media_type(first: Any) -> bytes:
    """Return the content type of a stream, which its first item determines."""
    if isinstance(first, str):
        return TEXT
    return BYTES if isinstance(first, bytes | bytearray | memoryview) else JSON_LINES


def validate_part(part: Any, name: str = "a part of the response's body") -> bytes:
    """Return the bytes that an application sends. Raises: UserError if it sends others; `bytes(3)` has three."""
    if not isinstance(part, (bytes, bytearray, memoryview)):
        raise UserError(f"{name} is of the type {type_name(part)}; use bytes")
    return bytes(part)


def _parse_form(kind: bytes, content_type: bytes, body: bytes) -> FormData:
    from starlette.formparsers import FormParser, MultiPartException  # noqa: PLC0415 - most requests are JSON

    codec = charset_of(content_type)
    try:
        if kind == FORM:
            text = body if codec == UTF8 else _form_in_utf8(body, content_type)
            size = len(text) + 1
            form = FormParser(make_headers(()), _chunks(text), max_fields=MAX_FORM_PARTS, max_part_size=size)
            return _run_without_loop(form.parse())
        from cortex.worker.requests.multipart_form import MultiPartFormParser  # noqa: PLC0415 - as above

        return _run_without_loop(MultiPartFormParser(content_type, body, MAX_FORM_PARTS).parse())
    except MultiPartException as exc:
        raise BadBody(f"malformed form: {exc.message}") from None


async def _chunks(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


def _form_in_utf8(body: bytes, content_type: bytes) -> bytes:
    """Return an urlencoded form whose escapes are those of UTF-8, too."""
    fields = [part.replace(b"+", b" ").partition(b"=") for part in body.split(b"&", MAX_FORM_PARTS + 1)]
    decoded = [(unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in fields]
    texts = [(decode_text(name, content_type), decode_text(value, content_type)) for name, value in decoded]
    return urlencode(texts).encode()


def _run_without_loop(coroutine: Coroutine[Any, Any, FormData]) -> FormData:
    """Run a coroutine that never waits, on any thread, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    coroutine.close()
    raise BadBody("malformed form")


def _encode_text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise UserError(f"the returned text cannot be encoded as UTF-8: {exc.reason}") from None


def _encode_response(response: Response, plain: type[Response]) -> Encoded:
    others: list[Header] = []
    media_type = None
    for name, value in validate_head(response.status_code, response.raw_headers):
        if name == b"content-type":
            media_type = value
        else:
            others.append((name, value))
    headers = ValidHeaders(tuple(others))
    if type(response).__call__ is not plain.__call__:  # streams, files, and subclasses that send their own body
        return Encoded(response.status_code, media_type, b"", headers, None, response)
    return Encoded(response.status_code, media_type, bytes(response.body), headers, response.background)


def _encode_model(model: Any) -> bytes:
    """Return the JSON of a pydantic model, whose parts may also be values that only Cortex encodes."""
    serializer = type(model).__pydantic_serializer__
    json_text: bytes = serializer.to_json(
        model, by_alias=True, fallback=lambda value: _PlainCopy().convert(value, "result")
    )
    return json_text


def _encode_other(value: Any) -> orjson.Fragment:
    """Return the JSON of a pydantic model, or a plain numpy number or array; the `default` hook of orjson.

    `OPT_SERIALIZE_NUMPY` is not used for the whole result, because it writes wrong dates and invalid JSON for NaT in
    arrays of datetime64. Raises: TypeError for everything else, which `_encode_json_slowly` handles.
    """
    name = type(value).__name__
    if hasattr(type(value), "__pydantic_serializer__"):
        return orjson.Fragment(_encode_model(value))
    if type(value).__module__ != "numpy" or (name != "ndarray" and name not in _NUMBERS):
        raise TypeError
    if name == "ndarray":
        if value.dtype.kind not in "biuf":
            raise TypeError
        value = value if value.flags.c_contiguous else value.copy(order="C")
    return orjson.Fragment(orjson.dumps(value, None, orjson.OPT_SERIALIZE_NUMPY))


def _encode_json_slowly(value: Any) -> bytes:
    """Return JSON for a value that orjson rejects, by visiting every value in it.

    Raises: UserError, which names the path of the first value that JSON cannot hold.
    """
    try:
        return orjson.dumps(value, _encode_other, _KEYS)
    except TypeError:
        pass
    try:
        plain = _PlainCopy().convert(value, "result")
        try:
            return orjson.dumps(plain)
        except TypeError:  # numbers beyond 64 bits, lone surrogates, deeper than orjson goes
            return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError:
        raise UserError("the result is nested too deeply for JSON") from None


def _describe_type(value: Any) -> str:
    """Return the name of a value's type, with its module unless it is a built-in."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name if len(name) <= _ITEM_LIMIT * 2 else f"{name[: _ITEM_LIMIT * 2]}…"


class _PlainCopy:
    """Conversion of a value into plain dicts, lists, strings and numbers."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        numpy: Any = sys.modules.get("numpy")
        self._numpy: Any = numpy if hasattr(numpy, "ndarray") else None

    def convert(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | str):
            return value.value if isinstance(value, Enum) else value
        if isinstance(value, Enum):
            return self.convert(value.value, path)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        if isinstance(value, dict):
            return self._nested(value, path, self._convert_dict)
        if isinstance(value, list | tuple):
            return self._nested(value, path, self._convert_list)
        return self._convert_other(value, path)

    def _nested(self, value: Any, path: str, convert: Callable[[Any, str], Any]) -> Any:
        if id(value) in self._inside:
            raise UserError(f"{path} contains itself, which JSON cannot represent")
        self._inside.add(id(value))
        try:
            return convert(value, path)
        finally:
            self._inside.discard(id(value))

    def _convert_dict(self, value: dict[Any, Any], path: str) -> dict[str, Any]:
        return {self._key(key, path): self.convert(item, f"{path}[{_shorten(key)}]") for key, item in value.items()}

    def _convert_list(self, value: list[Any], path: str) -> list[Any]:
        return [self.convert(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def _convert_other(self, value: Any, path: str) -> Any:
        if self._numpy is not None and isinstance(value, self._numpy.ndarray | self._numpy.generic):
            return self._convert_numpy(value, path)
        if isinstance(value, datetime | date | time | UUID):
            is_nat = type(value).__name__ == "NaTType"  # of pandas, which is a datetime
            return None if is_nat else str(value) if isinstance(value, UUID) else value.isoformat()
        if hasattr(type(value), "__pydantic_serializer__"):
            return self._convert_model(value, path)
        if type(value).__module__ in _TEXT_MODULES or isinstance(value, timedelta):
            from pydantic_core import to_jsonable_python  # noqa: PLC0415 - few results have such values

            return to_jsonable_python(value)
        library_name = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        if library_name == "pandas.NAType":
            return None
        if library_name in ("pandas.DataFrame", "pandas.Series"):
            if library_name == "pandas.DataFrame" and not value.columns.is_unique:
                repeated = value.columns[value.columns.duplicated()][0]
                raise UserError(f"{path} is a frame with several columns named {repeated!r}; rename them")
            plain = value.astype(object).where(value.notna(), None)
            rows = plain.to_dict("records") if library_name == "pandas.DataFrame" else plain.tolist()
            return self._nested(rows, path, self._convert_list)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return self._nested(fields, path, self._convert_dict)
        raise _not_serializable(value, path)

    def _convert_model(self, model: Any, path: str) -> Any:
        try:
            return parse_json(_encode_model(model))
        except UserError as error:
            reason = str(error)
        except ValueError as error:  # PydanticSerializationError
            reason = str(error)
        raise UserError(f"{path}: {_describe_type(model)} can't be encoded as JSON: {reason}")

    def _convert_numpy(self, value: Any, path: str) -> Any:
        numpy = self._numpy
        if value.dtype.kind == "m":
            raise _not_serializable(value, path)
        if value.dtype.kind == "M":
            unit = numpy.datetime_data(value.dtype)[0]
            shown = "s" if unit in ("Y", "M", "W", "D", "h", "m") else unit  # orjson shows at least seconds, too
            return _nulls(numpy.datetime_as_string(value, unit=None if unit == "generic" else shown).tolist())
        if value.dtype.char == "g":  # longdouble has no corresponding Python type
            return self.convert(value.astype(numpy.float64).tolist(), path)
        return self.convert(value.tolist(), path)

    def _key(self, key: Any, path: str) -> str:
        if self._numpy is not None and isinstance(key, self._numpy.generic):
            key = key.item()
        if isinstance(key, Enum):
            key = key.value
        if isinstance(key, str):
            return str(key)
        if key is None or isinstance(key, bool | int | float | datetime | date | time | UUID):
            try:
                return str(next(iter(orjson.loads(orjson.dumps({key: None}, None, _KEYS)))))
            except TypeError:
                return str(key)  # beyond 64 bits
        raise UserError(
            f"{path} has a key that is not valid in JSON: {_shorten(key)} ({_describe_type(key)}); use str(key)"
        )


def _nulls(texts: Any) -> Any:
    """Replace NaT by null in nested lists."""
    if isinstance(texts, list):
        return [_nulls(text) for text in texts]
    return None if texts == "NaT" else texts


def _not_serializable(value: Any, path: str) -> UserError:
    kind = type(value)
    fix = _FIXES.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}", "return numbers, strings, lists and dicts")
    return UserError(f"{path}: {_describe_type(value)} is not JSON serializable; {fix}")


def _shorten(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= _ITEM_LIMIT else text[: _ITEM_LIMIT - 1] + "…"
