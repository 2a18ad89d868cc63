"""The format of a recording: NDJSON, whose first line describes the file, and each further one an exchange.

    {"cortex_recording":1,"api":"iris","replica":"iris-1f0a…","process":0,"started":"2026-11-23T14:00:00Z"}
    {"id":"…","time":"…","duration_ms":3.1,"handler_ms":2.8,"method":"POST","path":"","query":"","headers":[…],
     "request":{"content_type":"application/json","json":{…}},"status":200,"response":{…}}

A body is `json`, `text` or `base64`. `truncated` marks one of which only the beginning is recorded, `bytes` is its
size; `redacted` marks one without the values of `networking.record.redact`; `omitted` one that could not be redacted.
Keys are never written: no header or query parameter whose name is that of a credential.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

import orjson

from cortex.errors import InputError
from cortex.recording.json_path import JsonPath

#: Changes when older versions could not read a recording correctly.
FORMAT = 1
FORMAT_KEY = "cortex_recording"
#: More of a body is not recorded.
MAX_BODY_BYTES = 1024 * 1024
#: Product in `User-Agent` of `cortex replay`, whose requests are not recorded again.
REPLAY_AGENT = "cortex-replay"

_REPLAY_AGENT = REPLAY_AGENT.encode()
_NS_PER_MS, _NS_PER_S = 1e6, 1e9
_MAX_NAMES = 1000
#: Names of headers and query parameters that have credentials.
_CREDENTIAL = re.compile(r"auth|cookie|token|secret|passw|credential|signature|api[-_]?key|session", re.IGNORECASE)
#: Headers of a connection and of the gateway, which a replay has to set itself.
_OF_CONNECTION = re.compile(
    r"host|connection|content-length|content-type|transfer-encoding|expect|te|trailer|upgrade|keep-alive|proxy-.*"
    r"|x-forwarded-.*|forwarded|x-cortex-.*|traceparent|tracestate"
)


class RawExchange(NamedTuple):
    """A request and its answer, as a worker has them."""

    request_id: bytes
    ended_ns: int  #: UNIX time
    duration_ns: int  #: from the arrival of the request
    handler_ns: int  #: of it in the user's code; 0: not known
    method: str
    path: bytes  #: below the endpoint
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]  #: of the request, names in lower case
    request: bytes  #: the body, or its beginning
    request_bytes: int  #: size of the whole body
    status: int
    media_type: bytes | None  #: of the answer; None: one of `answer_headers`
    answer_headers: Sequence[tuple[bytes, bytes]]
    answer: bytes
    answer_bytes: int
    is_stream: bool


@dataclass(frozen=True)
class Redaction:
    """Parts to remove from exchanges before they are written: values in JSON bodies, headers, query parameters."""

    paths: tuple[JsonPath, ...] = ()
    names: frozenset[str] = frozenset()  #: of headers and query parameters, in lower case

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Redaction:
        """Parse the entries of `networking.record.redact`. Raises: ValueError."""
        entries = tuple(entries)
        paths = tuple(JsonPath.parse(entry) for entry in entries if entry.startswith("$"))
        return cls(paths, frozenset(entry.lower() for entry in entries if not entry.startswith("$")))

    def allows(self, name: str) -> bool:
        """Return whether a header or query parameter is recorded."""
        return name.lower() not in self.names and not _CREDENTIAL.search(name)


class ExchangeEncoder:
    """Writes exchanges as lines. For one thread."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._headers: dict[bytes, bool] = {}  #: by name: it is recorded

    def encode(self, raw: RawExchange) -> bytes:
        """Return one line with its end; empty for a request of `cortex replay`."""
        headers: list[tuple[str, str]] = []
        media_type = b""
        for name, value in raw.headers:
            if name == b"user-agent" and value.startswith(_REPLAY_AGENT):
                return b""
            if self._headers.get(name) or (name not in self._headers and self._is_recorded(name)):
                headers.append((name.decode("latin-1"), value.decode("latin-1")))
            elif name == b"content-type":
                media_type = value
        answer_headers = {name.lower(): value for name, value in raw.answer_headers} if raw.answer_headers else {}
        line: dict[str, Any] = {
            "id": raw.request_id.decode("latin-1"),
            "time": datetime.fromtimestamp((raw.ended_ns - raw.duration_ns) / _NS_PER_S, UTC),
            "duration_ms": round(raw.duration_ns / _NS_PER_MS, 3),
            "method": raw.method,
            "path": raw.path.decode("latin-1"),
            "query": self._query(raw.query.decode("latin-1")),
            "headers": headers,
            "request": self._body(media_type, raw.request, raw.request_bytes),
            "status": raw.status,
            "response": self._body(
                raw.media_type or answer_headers.get(b"content-type", b""), raw.answer, raw.answer_bytes
            ),
        }
        if raw.handler_ns:
            line["handler_ms"] = round(raw.handler_ns / _NS_PER_MS, 3)
        if raw.is_stream:
            line["stream"] = True
        if answer_headers and (coding := answer_headers.get(b"content-encoding")):
            line["response"]["content_encoding"] = coding.decode("latin-1")
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z)

    def _is_recorded(self, name: bytes) -> bool:
        text = name.decode("latin-1")
        found = self._redaction.allows(text) and not _OF_CONNECTION.fullmatch(text.lower())
        if len(self._headers) < _MAX_NAMES:
            self._headers[name] = found
        return found

    def _query(self, query: str) -> str:
        if not query:
            return query
        parts = query.split("&")
        return "&".join(part for part in parts if self._redaction.allows(unquote_plus(part.partition("=")[0])))

    def _body(self, media_type: bytes, content: bytes, size: int) -> dict[str, Any]:
        body: dict[str, Any] = {"content_type": media_type.decode("latin-1")} if media_type else {}
        if not size:
            return body
        if is_cut := len(content) < size:
            body |= {"truncated": True, "bytes": size}
        paths = self._redaction.paths
        if media_type == b"application/json" or b"json" in media_type.lower():
            if not is_cut:
                try:
                    value = orjson.loads(content)
                except ValueError:
                    pass
                else:
                    if paths and sum(path.remove(value) for path in paths):
                        body |= {"redacted": True, "json": value}
                    else:  # as it was sent, unless its line breaks would end the line
                        body["json"] = value if b"\n" in content else orjson.Fragment(content)
                    return body
            if paths:
                return body | {"omitted": True, "bytes": size}
        try:
            text = content.decode()
        except UnicodeDecodeError:
            body["base64"] = base64.b64encode(content).decode()
        else:
            body["text"] = text
        return body


def encode_head(**fields: Any) -> bytes:
    """Return the first line of a file."""
    return orjson.dumps({FORMAT_KEY: FORMAT, **fields}, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z)


@dataclass(frozen=True, slots=True)
class RecordedBody:
    """The body of a recorded request or answer."""

    form: str = ""  #: "json", "text", "base64"; "": there was none
    value: Any = None  #: the JSON value, the text, or bytes
    content_type: str = ""
    content_encoding: str = ""
    is_truncated: bool = False
    is_redacted: bool = False
    is_omitted: bool = False

    @property
    def content(self) -> bytes:
        """Return the bytes to send."""
        if self.form == "json":
            try:
                return orjson.dumps(self.value)
            except orjson.JSONEncodeError:  # nested more deeply than it writes, though it reads such values
                return json.dumps(self.value).encode()
        return self.value.encode() if self.form == "text" else self.value or b""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A recorded request and its answer."""

    id: str
    started_s: float  #: UNIX time
    duration_ms: float
    handler_ms: float | None
    method: str
    path: str  #: below the endpoint
    query: str
    headers: tuple[tuple[str, str], ...]
    request: RecordedBody
    status: int
    response: RecordedBody
    place: str = ""  #: `file:line`

    @property
    def is_sendable(self) -> bool:
        """Return whether the request is recorded completely."""
        return not (self.request.is_truncated or self.request.is_omitted)


def parse_head(line: bytes, place: str) -> dict[str, Any]:
    """Parse the first line of a file. Raises: InputError."""
    head = _parse(line, place)
    number = head.get(FORMAT_KEY)
    if not isinstance(number, int) or isinstance(number, bool):
        raise InputError(f'{place}: not a recording: the first line of its files begins with {{"{FORMAT_KEY}":')
    if number > FORMAT:
        raise InputError(
            f"{place}: this recording has format {number}, and this version of cortex reads format {FORMAT}: "
            "replay it with a newer version"
        )
    return head


def parse_exchange(line: bytes, place: str) -> Exchange:
    """Parse a line; `place` is its `file:line`. Raises: InputError."""
    data = _parse(line, place)
    try:
        handler_ms = data.get("handler_ms")
        return Exchange(
            id=str(data["id"]),
            started_s=datetime.fromisoformat(data["time"]).timestamp(),
            duration_ms=float(data["duration_ms"]),
            handler_ms=float(handler_ms) if handler_ms is not None else None,
            method=str(data["method"]),
            path=str(data["path"]),
            query=str(data["query"]),
            headers=tuple((str(name), str(value)) for name, value in data["headers"]),
            request=_parse_body(data["request"]),
            status=int(data["status"]),
            response=_parse_body(data["response"]),
            place=place,
        )
    except KeyError as error:
        raise InputError(f"{place}: this line of the recording is damaged: it has no {error.args[0]!r}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{place}: this line of the recording is damaged: {error}") from None


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        data = orjson.loads(line)
    except ValueError as error:
        raise InputError(f"{place}: this line of the recording is damaged: it is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise InputError(f"{place}: this line of the recording is damaged: it is not an object")
    return data


def _parse_body(data: dict[str, Any]) -> RecordedBody:
    form = next((form for form in ("json", "text", "base64") if form in data), "")
    value = data.get(form)
    if form == "base64":
        try:
            value = base64.b64decode(data[form], validate=True)
        except binascii.Error as error:
            raise ValueError(f"its base64 is not valid ({error})") from None
    elif form == "text" and not isinstance(value, str):
        raise ValueError("its text is not a string")
    return RecordedBody(
        form=form,
        value=value,
        content_type=str(data.get("content_type", "")),
        content_encoding=str(data.get("content_encoding", "")),
        is_truncated=bool(data.get("truncated")),
        is_redacted=bool(data.get("redacted")),
        is_omitted=bool(data.get("omitted")),
    )
