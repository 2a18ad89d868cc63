"""Frames, compression, metadata, deadlines and statuses of gRPC."""

from __future__ import annotations

import gzip
import zlib

import grpc
import pytest
from google.protobuf.struct_pb2 import Value
from grpc_health.v1.health_pb2 import HealthCheckRequest

from cortex.errors import UserError
from cortex.predictor.protobuf import BoundRpc
from cortex.worker.grpc.messages import json_messages, parse_json
from cortex.worker.grpc.trailers import percent_encoded, supervisor_response, trailers
from cortex.worker.grpc.wire import (
    HTTP_STATUSES,
    MessageReader,
    RpcError,
    frame,
    headers_of,
    metadata_of,
    timeout_ns,
)


def compressed(data: bytes) -> bytes:
    return b"\1" + frame(data)[1:]


@pytest.mark.parametrize("size", [1, 3, 5, 7, 1000])
def test_messages_may_arrive_in_any_parts(size: int) -> None:
    messages = [b"", b"a", b"b" * 300, b"", b"c"]
    body = b"".join(map(frame, messages))
    reader = MessageReader(b"", 300)
    found = [message for at in range(0, len(body), size) for message in reader.feed(body[at : at + size])]
    assert found == messages
    assert reader.is_empty


def test_an_incomplete_message_is_noticed() -> None:
    reader = MessageReader(b"", 300)
    assert list(reader.feed(frame(b"abc")[:-1])) == []
    assert not reader.is_empty


def test_a_message_is_refused_before_it_is_read_if_it_is_too_large() -> None:
    with pytest.raises(RpcError, match="larger than 10 bytes") as raised:
        list(MessageReader(b"", 10).feed(frame(b"x" * 11)[:6]))
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(RpcError, match="larger than 1000 bytes"):  # once it is decompressed
        list(MessageReader(b"gzip", 1000).feed(compressed(gzip.compress(bytes(10**6)))))


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_compressed_messages_are_read(encoding: bytes, compress: object) -> None:
    assert callable(compress)
    body = compressed(compress(b"text" * 100)) + frame(b"plain")
    assert list(MessageReader(encoding, 1000).feed(body)) == [b"text" * 100, b"plain"]
    with pytest.raises(RpcError, match="decompressed"):
        list(MessageReader(encoding, 1000).feed(compressed(b"not compressed")))
    with pytest.raises(RpcError, match="its end is missing"):
        list(MessageReader(encoding, 1000).feed(compressed(compress(b"text" * 100)[:-1])))
    with pytest.raises(RpcError, match="snappy, only with identity,deflate,gzip") as raised:
        list(MessageReader(b"snappy", 1000).feed(body))
    assert raised.value.code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"5S", 5_000_000_000),
        (b"99999999n", 99_999_999),
        (b"1H", 3_600_000_000_000),
        (b"250m", 250_000_000),
        (b"3u", 3000),
        (b"2M", 120_000_000_000),
        (b"", None),
        (b"5", None),
        (b"-5S", None),
        (b"123456789S", None),
    ],
)
def test_deadlines_of_clients(header: bytes, expected: int | None) -> None:
    assert timeout_ns(header) == expected


def test_metadata_without_the_headers_of_grpc_and_of_the_gateway() -> None:
    headers = [
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"grpc-timeout", b"1S"),
        (b"x-cortex-request-id", b"1"),
        (b"user-agent", b"grpc"),
        (b"own-bin", b"AAH/"),
        (b"unpadded-bin", b"AAE"),
    ]
    assert metadata_of(headers) == (("user-agent", "grpc"), ("own-bin", b"\0\1\xff"), ("unpadded-bin", b"\0\1"))
    assert headers_of([("a", "b"), ("c-bin", b"\0\1")]) == ((b"a", b"b"), (b"c-bin", b"AAE"))
    for key, value in (("Upper", "a"), ("two words", "a"), ("text", "\u00fc"), ("line", "a\r\nb: c")):
        with pytest.raises(ValueError, match="metadata key"):
            headers_of([(key, value)])


def test_metadata_that_the_gateway_does_not_take_is_refused() -> None:
    assert headers_of([("connection", "close"), ("a", "b")]) == ((b"a", b"b"),)
    with pytest.raises(UserError, match="has 1001 headers; the gateway passes on up to 1000"):
        headers_of([("a", "b")] * 1001)
    with pytest.raises(UserError, match="KiB"):
        headers_of([("a", "b" * 600_000)])


def test_the_message_of_a_status_is_percent_encoded() -> None:
    assert percent_encoded("50 % \u00fc\n") == b"50 %25 %C3%BC%0A"
    assert trailers(5, "no", [(b"a", b"b")]) == b"0\r\ngrpc-status: 5\r\ngrpc-message: no\r\na: b\r\n\r\n"
    assert b"grpc-status: 4\r\n" in supervisor_response(504, "late")
    assert b"grpc-status: 14\r\ngrpc-message: out of memory\r\n" in supervisor_response(500, "out of memory")


def test_every_status_has_an_http_status() -> None:
    assert set(HTTP_STATUSES) == set(grpc.StatusCode)


def test_the_messages_of_a_request_in_json() -> None:
    assert json_messages(b'{"a": 1}', "Predict", streams=False) == [b'{"a": 1}']
    assert json_messages(b"", "Predict", streams=False) == [b"{}"]
    assert json_messages(b'[{"a": 1}, {}]', "Sum", streams=True) == [b'{"a": 1}', b"{}"]
    for body in (b'{"a": 1}', b"[", b"[" * 100_000):
        with pytest.raises(RpcError, match="JSON") as raised:
            json_messages(body, "Sum", streams=True)
        assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("body", [b"[]", b'""', b"null", b"5", b" [{}]", b"x"])
def test_a_message_in_json_must_be_an_object(body: bytes) -> None:
    check = BoundRpc("Check", "sync", lambda *_: None, False, False, HealthCheckRequest, HealthCheckRequest)
    with pytest.raises(RpcError) as caught:
        parse_json(check, body)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    expected = "the request is not a valid grpc.health.v1.HealthCheckRequest: it must be a JSON object"
    assert caught.value.message == expected
    assert parse_json(check, b' {"service": "a"}').service == "a"


def test_a_message_of_protobuf_itself_may_be_any_json() -> None:
    assert parse_json(BoundRpc("M", "sync", lambda *_: None, False, False, Value, Value), b"[5]").list_value[0] == 5
