"""Lines of a recording: what is written of a request, what never is, and what is read again."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import InputError
from cortex.recording.exchange import (
    FORMAT,
    ExchangeEncoder,
    RawExchange,
    Redaction,
    encode_head,
    parse_exchange,
    parse_head,
)

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


def raw(request: bytes = b'{"x":1}', answer: bytes = b'{"y":2}', **fields: Any) -> RawExchange:
    exchange = RawExchange(
        request_id=b"1795444423413-3404-29",
        ended_ns=1_795_444_423_415_000_000,
        duration_ns=1_500_000,
        handler_ns=400_000,
        method="POST",
        path=b"/v1/items",
        query=b"limit=2",
        headers=((b"content-type", b"application/json"), (b"x-thing", b"7")),
        request=request,
        request_bytes=len(request),
        status=200,
        media_type=b"application/json",
        answer_headers=(),
        answer=answer,
        answer_bytes=len(answer),
        is_stream=False,
    )
    return exchange._replace(**fields)


def encoded(exchange: RawExchange, *redact: str) -> dict[str, Any]:
    line = ExchangeEncoder(Redaction.parse(redact)).encode(exchange)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_has_the_request_and_its_answer() -> None:
    assert encoded(raw()) == {
        "id": "1795444423413-3404-29",
        "time": "2026-11-23T14:33:43.413500Z",
        "duration_ms": 1.5,
        "handler_ms": 0.4,
        "method": "POST",
        "path": "/v1/items",
        "query": "limit=2",
        "headers": [["x-thing", "7"]],
        "request": {"content_type": "application/json", "json": {"x": 1}},
        "status": 200,
        "response": {"content_type": "application/json", "json": {"y": 2}},
    }


@pytest.mark.parametrize(
    ("body", "media_type", "expected"),
    [
        (b'{"a":1.0}', b"application/json", {"json": {"a": 1.0}}),
        (b'{\n"a": [1]\n}', b"application/problem+json; charset=utf-8", {"json": {"a": [1]}}),
        (b"{broken", b"application/json", {"text": "{broken"}),
        (b'{"a": NaN}', b"application/json", {"text": '{"a": NaN}'}),
        ("grün".encode(), b"text/plain", {"text": "grün"}),
        (b"a,b\n1,2\n", b"text/csv", {"text": "a,b\n1,2\n"}),
        (b"\x89PNG\xff", b"image/png", {"base64": "iVBOR/8="}),
        (b"", b"application/json", {}),
        (b"\xff", b"", {"base64": "/w=="}),
    ],
)
def test_a_body_is_json_text_or_base64(body: bytes, media_type: bytes, expected: dict[str, Any]) -> None:
    found = encoded(raw(answer=body, media_type=media_type))["response"]
    assert found.pop("content_type", "") == media_type.decode()
    assert found == expected
    line = ExchangeEncoder(Redaction()).encode(raw(answer=body, media_type=media_type))
    content = parse_exchange(line, "f:2").response.content
    assert content == body or json.loads(content) == json.loads(body)


def test_a_cut_body_is_marked_and_cannot_be_sent_again() -> None:
    line = ExchangeEncoder(Redaction()).encode(raw(request=b'{"x":', request_bytes=9_000_000))
    assert json.loads(line)["request"] == {
        "content_type": "application/json",
        "truncated": True,
        "bytes": 9_000_000,
        "text": '{"x":',
    }
    assert not parse_exchange(line, "f:2").is_sendable


CREDENTIALS = [
    "Authorization",
    "Proxy-Authorization",
    "Cookie",
    "X-API-Key",
    "x-apikey",
    "X-Amz-Security-Token",
    "X-Client-Secret",
    "X-Password",
    "X-Session-Id",
    "X-Hub-Signature-256",
]


CREDENTIALS += ["key", "access_key", "sig", "pwd", "code", "jwt", "sid"]
CREDENTIALS += ["X-Access-Key", "Ocp-Apim-Subscription-Key", "X-JWT", "X-Pwd", "X-CSRF"]


@pytest.mark.parametrize("name", CREDENTIALS)
def test_keys_are_never_written(name: str) -> None:
    headers = ((name.lower().encode(), b"geheim"), (b"x-thing", b"7"))
    query = f"{name}=geheim&a=1&{name.replace('-', '%2D')}=geheim".encode()
    line = encoded(raw(headers=headers, query=query))
    assert "geheim" not in json.dumps(line)
    assert (line["headers"], line["query"]) == ([["x-thing", "7"]], "a=1")


def test_known_secrets_and_credentials_in_other_headers_become_asterisks() -> None:
    redaction = Redaction.parse((), ["geheim", 'with "quotes"'])
    exchange = raw(
        b'{"a": "geheim", "b": "with \\"quotes\\""}',
        b"\xff geheim",
        headers=((b"referer", b"https://h/x?token=abc"), (b"x-forward", b"Bearer abc"), (b"x-note", b"a geheim")),
        query=b"a=geheim",
        media_type=b"application/octet-stream",
    )
    line = json.loads(ExchangeEncoder(redaction).encode(exchange))
    assert line["request"]["json" if "json" in line["request"] else "text"]
    assert "geheim" not in json.dumps(line) and "quotes" not in json.dumps(line["request"])
    assert base64.b64decode(line["response"]["base64"]) == b"\xff ******"
    assert line["headers"] == [
        ["referer", "https://h/x?token=********"], ["x-forward", "Bearer ********"], ["x-note", "a ********"]
    ]  # fmt: skip
    assert line["query"] == "a=******"


def test_a_known_secret_may_be_bytes_that_are_not_utf_8() -> None:
    redaction = Redaction.parse((), [os.fsdecode(b"geheim\xe4\xff")])
    exchange = raw(b"1", b"\x00 geheim\xe4\xff", media_type=b"application/octet-stream")
    line = json.loads(ExchangeEncoder(redaction).encode(exchange))
    assert line["response"]["text"] == "\x00 ********"


def test_redacted_values_headers_and_parameters_are_removed_from_request_and_answer() -> None:
    exchange = raw(
        b'{"user": {"email": "geheim", "age": 3}}',
        b'{"items": [{"name": "geheim"}, {"name": "geheim"}]}',
        headers=((b"content-type", b"application/json"), (b"x-user", b"geheim")),
        query=b"User=geheim&a=1",
    )
    line = encoded(exchange, "$.user.email", "$..name", "X-User", "user")
    assert "geheim" not in json.dumps(line)
    assert line["request"] == {"content_type": "application/json", "redacted": True, "json": {"user": {"age": 3}}}
    assert line["response"]["json"] == {"items": [{}, {}]}


def test_json_that_cannot_be_redacted_is_omitted() -> None:
    cut = raw(b'{"user": "geheim', request_bytes=10**7, answer=b"{geheim")
    line = encoded(cut, "$.user")
    assert "geheim" not in json.dumps(line)
    assert line["request"] == {
        "content_type": "application/json",
        "truncated": True,
        "omitted": True,
        "bytes": 10**7,
    }
    assert line["response"]["omitted"]


@pytest.mark.parametrize("redact", [(), ("User-Agent",)])
def test_requests_of_a_replay_are_not_recorded_again(redact: tuple[str, ...]) -> None:
    encoder = ExchangeEncoder(Redaction.parse(redact))
    for _ in range(2):
        assert encoder.encode(raw(headers=((b"user-agent", b"cortex-replay/1.0"),))) == b""
    other = json.loads(encoder.encode(raw(headers=((b"user-agent", b"curl"), (b"x-thing", b"7")))))
    assert other["headers"] == ([] if redact else [["user-agent", "curl"]]) + [["x-thing", "7"]]


VALUES = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=300).map(
    lambda text: text.encode("latin-1")
)
HEADERS = st.lists(
    st.tuples(st.sampled_from([b"x-thing", b"x-user", b"cookie", b"user-agent", b"accept"]), VALUES),
    max_size=5,
)


@given(st.lists(st.tuples(HEADERS, st.integers(0, 2**62), st.integers(0, 2**40)), min_size=1, max_size=20))
@pytest.mark.heavy
def test_what_an_encoder_keeps_in_memory_changes_no_line(
    exchanges: list[tuple[list[tuple[bytes, bytes]], int, int]],
) -> None:
    used, redaction = ExchangeEncoder(Redaction.parse(["x-user"])), Redaction.parse(["x-user"])
    for headers, ended_ns, duration_ns in exchanges:
        exchange = raw(headers=headers, ended_ns=ended_ns + duration_ns, duration_ns=duration_ns)
        line = used.encode(exchange)
        assert line == ExchangeEncoder(redaction).encode(exchange)
        read = parse_exchange(line, "f:2")
        assert read.started_s == pytest.approx(ended_ns / 1e9, abs=1e-3)
        assert [(name.encode(), value.encode("latin-1")) for name, value in read.headers] == [
            header for header in headers if header[0] not in (b"cookie", b"x-user")
        ]


@given(JSON_VALUES, st.sampled_from([None, 2]))
def test_json_is_read_as_it_was_sent(value: Any, indent: int | None) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    line = ExchangeEncoder(Redaction()).encode(raw(answer=body))
    assert line.count(b"\n") == 1
    read = parse_exchange(line, "f:2").response
    assert (read.form, read.value) == ("json", orjson.loads(body)) or read.content == body


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_any_bytes_are_read_as_they_were_sent(request: bytes, answer: bytes) -> None:
    headers = ((b"content-type", b"image/x-any"), (b"x-odd", b"\xe4\xff"))
    exchange = raw(request, answer, headers=headers, media_type=b"image/x-any", query=b"q=\xe4")
    read = parse_exchange(ExchangeEncoder(Redaction()).encode(exchange), "f:2")
    assert (read.request.content, read.response.content) == (request, answer)
    assert read.headers == (("x-odd", "\xe4\xff"),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "f:7: this line of the recording is damaged: it is not JSON"),
        (b'{"id": "a"', "f:7: this line of the recording is damaged: it is not JSON"),
        (b"[]", "f:7: this line of the recording is damaged: it is not an object"),
        (b'{"id": "a"}', "f:7: this line of the recording is damaged: it has no 'time'"),
    ],
)
def test_a_damaged_line_is_named_with_its_place(line: bytes, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_exchange(line, "f:7")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time", "yesterday"),
        ("duration_ms", "long"),
        ("status", None),
        ("headers", [1]),
        ("headers", [["x-thing", "\u20ac"]]),
        ("headers", [["x-thing", "7\r\nx-other: 8"]]),
        ("headers", [["x thing", "7"]]),
        ("method", "GE T"),
        ("path", "/\u20ac"),
        ("query", "a=1 2"),
        ("request", {"content_type": "text/plain\r\nx-other: 8"}),
        ("request", []),
        ("response", {"base64": "!"}),
        ("response", {"text": 5}),
    ],
)
def test_a_damaged_value_is_named_with_its_place(field: str, value: Any) -> None:
    line = json.dumps(encoded(raw()) | {field: value}).encode()
    with pytest.raises(InputError, match="^f:7: this line of the recording is damaged: "):
        parse_exchange(line, "f:7")


def test_a_newer_format_and_another_file_are_refused() -> None:
    assert parse_head(encode_head(api="iris"), "f:1")["api"] == "iris"
    newer = b'{"cortex_recording": %d}' % (FORMAT + 1)
    with pytest.raises(InputError, match="f:1: this recording has format 2, .* replay it with a newer version"):
        parse_head(newer, "f:1")
    with pytest.raises(InputError, match="f:1: not a recording"):
        parse_head(b'{"time": 1}', "f:1")
