"""Turn a request's body into a payload, and what the user's code returned into a body.

It knows content types and JSON, not connections. starlette is imported only once a request or a result needs it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from cortex.errors import UserError
from cortex.replica.json_values import dumps_slowly, from_numpy

if TYPE_CHECKING:
    from starlette.datastructures import FormData, Headers, QueryParams
    from starlette.responses import Response

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
BYTES = b"application/octet-stream"
JSON_LINES = b"application/x-ndjson"

#: Parts of one form; more is an attack on the parser, not a form.
MAX_FORM_PARTS = 1000

_FORM = b"application/x-www-form-urlencoded"
_MULTIPART = b"multipart/form"
_SERVERS_HEADERS = frozenset(
    (b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"proxy-connection", b"upgrade")
)
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_IN_HEADER = re.compile(rb"[\0\r\n]")
_UTF8_BOM = b"\xef\xbb\xbf"


class BadBody(Exception):
    """The body is not what its content type says: status 400; `str(error)` is for the caller."""


class Encoded(NamedTuple):
    """An answer. `headers` leave out content-type and content-length, which the server writes."""

    status: int
    media_type: bytes | None
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    background: Callable[[], Awaitable[None]] | None = None  #: to be awaited once the answer is sent
    response: Response | None = None  #: a starlette response that sends its own body: see `open_response`


#: Encoded(…) without the call of its Python-level constructor, which takes as long as encoding a small result.
_new_encoded = tuple.__new__


def parse(content_type: bytes | None, body: bytes, json_only: bool = False) -> Any:
    """Return the payload: JSON, FormData, str, or bytes by content type; with `json_only`, JSON or None.

    Raises: BadBody.
    """
    if content_type == JSON:
        return _parse_json(body)
    kind = content_type.partition(b";")[0].strip().lower() if content_type else b""
    if kind == JSON:
        return _parse_json(body)
    if json_only:
        return None
    if content_type is not None:
        if kind == b"text/plain":
            return _parse_text(content_type, body)
        if kind == _FORM or kind.startswith(_MULTIPART):
            return _parse_form(kind, content_type, body)
    return body


def make_query_params(query: bytes) -> QueryParams:
    """Return what follows the `?` as a multi-dict."""
    from starlette.datastructures import QueryParams  # noqa: PLC0415 - slow to import, most methods don't ask

    return QueryParams(query)


def make_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers as a case-insensitive multi-dict."""
    from starlette.datastructures import Headers  # noqa: PLC0415 - as above

    return Headers(raw=[(name.lower(), value) for name, value in raw])


def encode(result: Any, json_strings: bool = False) -> Encoded:
    """Return the answer for what the user's method returned; with `json_strings`, a str is a JSON string.

    numpy scalars and arrays become numbers and lists; NaN and infinities, which JSON lacks, become null.
    Raises: UserError, naming the place of a value that JSON can't hold.
    """
    kind = type(result)
    if kind is dict or kind is list:
        return _new_encoded(Encoded, (200, JSON, encode_json(result), (), None, None))
    if isinstance(result, str) and not json_strings:
        return Encoded(200, TEXT, _encode_text(result))
    if isinstance(result, bytes | bytearray | memoryview):
        return Encoded(200, BYTES, bytes(result))
    responses = sys.modules.get("starlette.responses")  # not imported: then no result can be one
    if responses is not None and isinstance(result, responses.Response):
        return _encode_response(result, responses.Response)
    return Encoded(200, JSON, encode_json(result))


def encode_json(result: Any) -> bytes:
    """Return JSON; one call of orjson for whatever it can do, the slow way for the rest."""
    try:
        return orjson.dumps(result, from_numpy)
    except TypeError:
        pass  # what is raised from here on must not look like a consequence of this
    return dumps_slowly(result)


def encode_chunk(item: Any) -> bytes:
    """Return one item of a stream: bytes and str as they are, anything else as a line of JSON."""
    if isinstance(item, str):
        return _encode_text(item)
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    return encode_json(item) + b"\n"


def stream_media_type(first: Any) -> bytes:
    """Return the content type of a stream by its first item."""
    if isinstance(first, str):
        return TEXT
    return BYTES if isinstance(first, bytes | bytearray | memoryview) else JSON_LINES


def checked_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of an answer, in lower case, less those that are the server's own business.

    Raises: UserError for what is not HTTP: the gateway would wait for more, or take a part for another answer.
    """
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise UserError(f"the response has the status {status!r}; use one from 200 to 599")
    kept = []
    for name, value in headers:
        if not isinstance(name, bytes) or not _HEADER_NAME.fullmatch(name):
            raise UserError(f"the response has a header with the name {name!r}; use letters, digits and dashes")
        if not isinstance(value, bytes) or _NOT_IN_HEADER.search(value):
            raise UserError(f"the value of the response's header {name.decode()!r} is not one line of text")
        if (name := name.lower()) not in _SERVERS_HEADERS:
            kept.append((name, value))
    return tuple(kept)


def _parse_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        if body.startswith(_UTF8_BOM):
            return _parse_json(body[len(_UTF8_BOM) :])
        reason = f"{exc.msg}: line {exc.lineno} column {exc.colno}" if body else "the body is empty"
        raise BadBody(f"malformed JSON: {reason}") from None


def _parse_text(content_type: bytes, body: bytes) -> str:
    charset = "utf-8"
    for parameter in content_type.split(b";")[1:]:
        name, _, value = parameter.partition(b"=")
        if name.strip().lower() == b"charset":
            charset = value.strip().strip(b"\"'").decode("ascii", "replace")
    try:
        return body.decode(charset)
    except (LookupError, ValueError):  # ValueError: undecodable, or a NUL in the charset's name
        raise BadBody(f"the body is not {charset[:40]!r} text") from None


def _parse_form(kind: bytes, content_type: bytes, body: bytes) -> FormData:
    from starlette.datastructures import Headers  # noqa: PLC0415 - slow to import, most requests are JSON
    from starlette.formparsers import FormParser, MultiPartException, MultiPartParser  # noqa: PLC0415 - as above

    async def whole_body() -> AsyncGenerator[bytes, None]:
        yield body

    headers = Headers(raw=[(b"content-type", content_type)])
    # The body is in memory, and bounded, already: a size limit of one part, or a spill to disk, would add nothing.
    size = len(body) + 1
    parser: FormParser | MultiPartParser
    if kind == _FORM:
        parser = FormParser(headers, whole_body(), max_fields=MAX_FORM_PARTS, max_part_size=size)
    else:
        parser = MultiPartParser(
            headers, whole_body(), max_files=MAX_FORM_PARTS, max_fields=MAX_FORM_PARTS, max_part_size=size
        )
        parser.spool_max_size = size
    try:
        return _run_without_loop(parser.parse())
    except MultiPartException as exc:
        raise BadBody(f"malformed form: {exc.message}") from None


def _run_without_loop(coroutine: Coroutine[Any, Any, FormData]) -> FormData:
    """Finish a coroutine that never waits, which lets a form be parsed in any thread, without a loop."""
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
        raise UserError(f"the text that was returned can't be sent as UTF-8: {exc.reason}") from None


def _encode_response(response: Response, plain: type[Response]) -> Encoded:
    headers: list[tuple[bytes, bytes]] = []
    media_type = None
    for name, value in checked_head(response.status_code, response.raw_headers):
        if name == b"content-type":
            media_type = value
        else:
            headers.append((name, value))
    if type(response).__call__ is not plain.__call__:  # streams, files, and subclasses that send by themselves
        return Encoded(response.status_code, media_type, b"", tuple(headers), None, response)
    return Encoded(response.status_code, media_type, bytes(response.body), tuple(headers), response.background)
