"""The format of a recording: NDJSON, whose first line describes the file, and each further one an exchange.

    {"cortex_recording":1,"api":"iris","replica":"iris-1f0a…","process":0,"started":"2026-11-23T14:00:00Z","share":0.1}
    {"id":"…","time":"…","duration_ms":3.1,"handler_ms":2.8,"method":"POST","path":"","query":"","headers":[…],
     "request":{"content_type":"application/json","json":{…}},"status":200,"response":{…}}

A body is `json`, `text` or `base64`. `truncated` marks one of which only the beginning is recorded, `bytes` is its
size; `redacted` marks one without the values of `networking.record.redact`; `omitted` one that could not be redacted.
`unrecorded` counts the requests of the share that were left out since the line before, so that a replay knows how many
requests per second there were. Keys are never written: no header or query parameter whose name is that of a credential.
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
from cortex.masking import is_credential, mask_text
from cortex.payloads.json_bodies import dump_json, parse_json
from cortex.recording.json_path import JsonPath

#: Changes when older versions could not read a recording correctly.
FORMAT = 1
FORMAT_KEY = "cortex_recording"
#: More of a body is not recorded.
MAX_BODY_BYTES = 1024 * 1024
#: Product in `User-Agent` of `cortex replay`, whose requests are not recorded again.
REPLAY_AGENT = "cortex-replay"

_AGENT, _REPLAY_AGENT = b"user-agent", REPLAY_AGENT.encode()
_NS_PER_US, _NS_PER_MS, _NS_PER_S = 1000, 1e6, 1_000_000_000
#: Number of names, and of headers, that an encoder keeps in memory; longer headers are not kept.
_MAX_NAMES, _MAX_CACHED_BYTES = 1000, 256
#: Instead of the header of a request of `cortex replay`.
_OF_REPLAY = b"replay"
#: Headers of a connection and of the gateway, which a replay has to set itself.
_OF_CONNECTION = re.compile(
    r"host|connection|content-length|content-type|transfer-encoding|expect|te|trailer|upgrade|keep-alive|proxy-.*"
    r"|x-forwarded-.*|forwarded|x-cortex-.*|traceparent|tracestate"
)
#: What can be sent: characters are bytes.
_METHOD = re.compile(r"[A-Z-]+")
_HEADER_NAME, _HEADER_VALUE = re.compile(r"[!-9;-~]+"), re.compile(r"[^\r\n\0\u0100-\U0010ffff]*")
_URL_PART = re.compile(r"[!-~\x80-\xff]*")


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
    unrecorded: int = 0  #: requests of the share since the one recorded before, of the same process


@dataclass(frozen=True)
class Redaction:
    """Parts to remove from exchanges before they are written: values in JSON bodies, headers, query parameters."""

    paths: tuple[JsonPath, ...] = ()
    names: frozenset[str] = frozenset()  #: of headers and query parameters, in lower case
    values: tuple[str, ...] = ()  #: of secrets, which become asterisks

    @classmethod
    def parse(cls, entries: Iterable[str], values: Iterable[str] = ()) -> Redaction:
        """Parse the entries of `networking.record.redact`; `values` are those of secrets. Raises: ValueError."""
        entries = tuple(entries)
        paths = tuple(JsonPath.parse(entry) for entry in entries if entry.startswith("$"))
        return cls(paths, frozenset(entry.lower() for entry in entries if not entry.startswith("$")), tuple(values))

    def allows(self, name: str) -> bool:
        """Return whether a header or query parameter is recorded."""
        return name.lower() not in self.names and not is_credential(name)


class ExchangeEncoder:
    """Writes exchanges as lines. For one thread at a time.

    It formats bytes instead of serializing objects, which takes a third of the time: `python -m benchmarks.recording`.
    """

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        forms = (form for text in redaction.values for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]))
        encoded = dict.fromkeys(form.encode(errors="surrogateescape") for form in forms)  # variables may be any bytes
        self._secrets = [(form, b"*" * len(form)) for form in encoded]  #: sizes of bodies stay
        self._names: dict[bytes, bool] = {}  #: of headers: they are recorded
        self._headers: dict[tuple[bytes, bytes], bytes] = {}  #: as they are written
        self._json_prefixes: dict[bytes, bytes] = {}  #: of bodies, by media type; empty: not JSON, or redacted
        self._second, self._second_text = -1, b""  #: the latest one, as it is written

    def encode(self, raw: RawExchange) -> bytes:
        """Return one line with its end; empty for a request of `cortex replay`."""
        (
            request_id,
            ended_ns,
            duration_ns,
            handler_ns,
            method,
            path,
            query,
            request_headers,
            request,
            request_bytes,
            status,
            answer_type,
            answer_headers,
            answer,
            answer_bytes,
            is_stream,
            unrecorded,
        ) = raw
        headers: list[bytes] = []
        media_type = coding = b""
        for secret, stars in self._secrets:
            query, request, answer = (part.replace(secret, stars) for part in (query, request, answer))
        names, written = self._names, self._headers
        for header in request_headers:
            name = header[0]
            is_recorded = names.get(name)
            if is_recorded is None:
                is_recorded = self._is_recorded(name)
            if is_recorded:
                text = written.get(header) or self._header(header)
                if text == _OF_REPLAY:
                    return b""
                if text:
                    headers.append(text)
            elif name == b"content-type":
                media_type = header[1]
        if answer_headers:
            by_name = {name.lower(): value for name, value in answer_headers}
            answer_type = answer_type or by_name.get(b"content-type")
            coding = by_name.get(b"content-encoding", b"")
        second, rest_ns = divmod(ended_ns - duration_ns, _NS_PER_S)
        if second != self._second:
            self._second = second
            self._second_text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()
        return b"".join(
            (
                b'{"id":',
                _quoted(request_id),
                b',"time":"',
                self._second_text,
                b'.%06dZ","duration_ms":%.3f' % (rest_ns // _NS_PER_US, duration_ns / _NS_PER_MS),
                b',"handler_ms":%.3f' % (handler_ns / _NS_PER_MS) if handler_ns else b"",
                b',"method":"',
                method.encode(),
                b'","path":',
                _quoted(path) if path else b'""',
                b',"query":',
                _quoted(self._query(query)) if query else b'""',
                b',"headers":[',
                b",".join(headers),
                b'],"request":',
                self._body(media_type, request, request_bytes, b""),
                b',"status":%d,"response":' % status,
                self._body(answer_type or b"", answer, answer_bytes, coding),
                b',"unrecorded":%d' % unrecorded if unrecorded else b"",
                b',"stream":true}\n' if is_stream else b"}\n",
            )
        )

    def _is_recorded(self, name: bytes) -> bool:
        text = name.decode("latin-1")
        found = name == _AGENT or (self._redaction.allows(text) and not _OF_CONNECTION.fullmatch(text.lower()))
        if len(self._names) < _MAX_NAMES:
            self._names[name] = found
        return found

    def _header(self, header: tuple[bytes, bytes]) -> bytes:
        if header[0] == _AGENT:
            if header[1].startswith(_REPLAY_AGENT):
                return _OF_REPLAY
            if not self._redaction.allows("user-agent"):
                return b""
        value = mask_text(header[1].decode("latin-1"), self._redaction.values).encode("latin-1")
        text = b"[%b,%b]" % (_quoted(header[0]), _quoted(value))
        if len(text) <= _MAX_CACHED_BYTES:
            if len(self._headers) == _MAX_NAMES:
                self._headers.clear()
            self._headers[header] = text
        return text

    def _query(self, query: bytes) -> bytes:
        return b"&".join(
            part
            for part in query.split(b"&")
            if self._redaction.allows(unquote_plus(part.partition(b"=")[0].decode("latin-1")))
        )

    def _body(self, media_type: bytes, content: bytes, size: int, coding: bytes) -> bytes:
        prefix = self._json_prefixes.get(media_type)
        if prefix is None:
            prefix = self._json_prefix(media_type)
        if prefix and len(content) == size and size and not coding and b"\n" not in content:
            try:
                orjson.loads(content)
            except ValueError:
                pass
            else:
                return prefix + content + b"}"
        body: dict[str, Any] = {"content_type": media_type.decode("latin-1")} if media_type else {}
        if coding:
            body["content_encoding"] = coding.decode("latin-1")
        if size:
            is_cut = len(content) < size
            body |= {"truncated": True, "bytes": size} if is_cut else {}
            body |= self._content(content, size, _is_json(media_type), is_cut)
        return orjson.dumps(body)

    def _json_prefix(self, media_type: bytes) -> bytes:
        prefix = b""
        if _is_json(media_type) and not self._redaction.paths:
            prefix = b'{"content_type":%b,"json":' % _quoted(media_type)
        if len(self._json_prefixes) < _MAX_NAMES and len(media_type) <= _MAX_CACHED_BYTES:
            self._json_prefixes[media_type] = prefix
        return prefix

    def _content(self, content: bytes, size: int, is_json: bool, is_cut: bool) -> dict[str, Any]:
        paths = self._redaction.paths
        if is_json and not is_cut:
            try:
                value = parse_json(content)
            except ValueError:
                pass
            else:
                if paths and sum(path.remove(value) for path in paths):
                    return {"redacted": True, "json": orjson.Fragment(dump_json(value))}
                # As it was sent, unless its line breaks would end the line.
                return {"json": orjson.Fragment(dump_json(value) if b"\n" in content else content)}
        if is_json and paths:
            return {"omitted": True, "bytes": size}
        try:
            return {"text": content.decode()}
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(content).decode()}


def _quoted(text: bytes) -> bytes:
    """Return a JSON string."""
    return orjson.dumps(text.decode("latin-1"))


def _is_json(media_type: bytes) -> bool:
    return b"json" in media_type.lower()


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
            return dump_json(self.value)
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
    stands_for: float = 1.0  #: requests that there were, with those that are not recorded

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


def parse_exchange(line: bytes, place: str, share: float = 1.0) -> Exchange:
    """Parse a line; `place` is its `file:line`, and `share` that of its file. Raises: InputError."""
    data = _parse(line, place)
    try:
        handler_ms = data.get("handler_ms")
        return Exchange(
            id=str(data["id"]),
            started_s=datetime.fromisoformat(data["time"]).timestamp(),
            duration_ms=float(data["duration_ms"]),
            handler_ms=float(handler_ms) if handler_ms is not None else None,
            method=_matching(_METHOD, str(data["method"]), "a method"),
            path=_matching(_URL_PART, str(data["path"]), "part of a URL"),
            query=_matching(_URL_PART, str(data["query"]), "part of a URL"),
            headers=tuple(_parse_header(str(name), str(value)) for name, value in data["headers"]),
            request=_parse_body(data["request"]),
            status=int(data["status"]),
            response=_parse_body(data["response"]),
            place=place,
            stands_for=(1 + int(data.get("unrecorded", 0))) / share,
        )
    except KeyError as error:
        raise InputError(f"{place}: this line of the recording is damaged: it has no {error.args[0]!r}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{place}: this line of the recording is damaged: {error}") from None


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        data = parse_json(line)
    except ValueError as error:
        raise InputError(f"{place}: this line of the recording is damaged: it is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise InputError(f"{place}: this line of the recording is damaged: it is not an object")
    return data


def _matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"{json.dumps(text)[:80]} is not {what}")
    return text


def _parse_header(name: str, value: str) -> tuple[str, str]:
    if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
        raise ValueError(f"{json.dumps([name, value])[:80]} is not a header")
    return name, value


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
        content_type=_parse_header("content-type", str(data.get("content_type", "")))[1],
        content_encoding=str(data.get("content_encoding", "")),
        is_truncated=bool(data.get("truncated")),
        is_redacted=bool(data.get("redacted")),
        is_omitted=bool(data.get("omitted")),
    )
