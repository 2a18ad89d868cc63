"""Routes, documents and bodies of the Open Inference Protocol, without tensors."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.payloads.inference_protocol import (
    InferenceRoute,
    V2Error,
    decompress,
    model_document,
    parse_json_length,
    parse_route,
)
from cortex.payloads.signature import ModelSignature, TensorSignature


@pytest.mark.parametrize(
    ("path", "route"),
    [
        (b"/v2", InferenceRoute("server")),
        (b"/v2/", InferenceRoute("server")),
        (b"/v2/health/live", InferenceRoute("live")),
        (b"/v2/health/ready", InferenceRoute("ready")),
        (b"/v2/models", InferenceRoute("models")),
        (b"/v2/models/iris", InferenceRoute("model", "iris")),
        (b"/v2/models/iris/ready", InferenceRoute("model_ready", "iris")),
        (b"/v2/models/iris/infer", InferenceRoute("infer", "iris")),
        (b"/v2/models/iris/versions/3", InferenceRoute("model", "iris", "3")),
        (b"/v2/models/iris/versions/3/ready", InferenceRoute("model_ready", "iris", "3")),
        (b"/v2/models/iris/versions/3/infer", InferenceRoute("infer", "iris", "3")),
        (b"/v2/models/a%20b%2Fc/infer", InferenceRoute("infer", "a b/c")),
        (b"/v2/models/ready", InferenceRoute("model", "ready")),
    ],
)
def test_a_path_selects_a_route(path: bytes, route: InferenceRoute) -> None:
    assert parse_route(path) == route
    assert route.verb == ("POST" if route.kind == "infer" else "GET")


@pytest.mark.parametrize(
    "path",
    [
        b"/v2/x",
        b"/v2/health",
        b"/v2/models//infer",
        b"/v2/models/m/versions",
        b"/v2/models/m/versions//infer",
        b"/v2/models/m/x",
        b"/v2/models/m/infer/x",
        b"/v2//models",
        b"/v2/\xff\xfe",
    ],
)
def test_an_unknown_path_is_not_found(path: bytes) -> None:
    with pytest.raises(V2Error, match="is not a path of the Open Inference Protocol; its paths are v2,") as caught:
        parse_route(path)
    assert caught.value.status == 404


@given(st.lists(st.sampled_from([b"v2", b"models", b"versions", b"infer", b"ready", b"", b"%", b"\xff", b"m"])))
def test_any_path_is_a_route_or_not_found(segments: list[bytes]) -> None:
    try:
        route = parse_route(b"/" + b"/".join(segments))
    except V2Error as error:
        assert error.status == 404
    else:
        assert bool(route.model) == (route.kind in ("model", "model_ready", "infer"))


@given(st.binary(max_size=50), st.sampled_from([b"gzip", b"deflate", b"br"]))
def test_any_compressed_body_is_bounded_or_refused(body: bytes, encoding: bytes) -> None:
    try:
        assert len(decompress(body, encoding, None, 100)[0]) <= 100
    except V2Error as error:
        assert error.status in (400, 413, 415)


def test_metadata_lists_versions_and_tensors() -> None:
    signature = ModelSignature("m", "sklearn", (TensorSignature("x", "FP32", (-1, 4)),), ())
    tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
    assert model_document("iris", signature, ("1", "2")) == {
        "name": "iris",
        "versions": ("1", "2"),
        "platform": "sklearn",
        "inputs": [tensor],
        "outputs": [],
    }
    assert "versions" not in model_document("iris", signature, ())
    labelled = TensorSignature("x", "FP32", (-1, 2), labels=("a", "b"))
    optional = TensorSignature("c", "BYTES", (-1, 1), optional=True)
    inputs = model_document("iris", ModelSignature("m", "mlflow", (labelled, optional), ()), ())["inputs"]
    assert [each["parameters"] for each in inputs] == [{"labels": ["a", "b"]}, {"optional": True}]


def _bare_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"", b"hello"),
        (b"identity", b"hello"),
        (b"gzip", gzip.compress(b"hello", mtime=0)),
        (b"GZIP", gzip.compress(b"hello", mtime=0)),
        (b"deflate", zlib.compress(b"hello")),
        (b"deflate", _bare_deflate(b"hello")),
    ],
)
def test_bodies_are_decompressed(encoding: bytes, body: bytes) -> None:
    assert decompress(body, encoding, None, 5) == (b"hello", None)


@pytest.mark.parametrize(
    ("encoding", "body", "status", "message"),
    [
        (b"br", b"", 415, "the content encoding 'br' is not supported; use gzip, deflate or none"),
        (b"gzip", b"hello", 400, "the body is not valid gzip"),
        (b"gzip", b"", 400, "it is incomplete"),
        (b"gzip", gzip.compress(b"hello", mtime=0)[:-9], 400, "it is incomplete"),
        (b"gzip", gzip.compress(b"hello", mtime=0) + b"x", 400, "bytes follow its end"),
        (b"deflate", b"", 400, "it is incomplete"),
        (b"deflate", zlib.compress(b"\0" * 1_000_000), 413, "the decompressed body is larger than 100 bytes"),
    ],
)
def test_compressed_bodies_are_bounded_and_checked(encoding: bytes, body: bytes, status: int, message: str) -> None:
    with pytest.raises(V2Error, match=message) as caught:
        decompress(body, encoding, None, 100)
    assert caught.value.status == status


def test_compressed_json_does_not_grow_to_millions_of_objects() -> None:
    limit = 100 * 1024**2
    packed = gzip.compress(b"[" + b"{}," * 4_000_000 + b"{}]")
    with pytest.raises(V2Error, match="more than 100 times the compressed body; send it uncompressed") as caught:
        decompress(packed, b"gzip", None, limit)
    assert caught.value.status == 413
    zeros = gzip.compress(b"{}" + bytes(20_000_000))  # binary tensors may be as empty as they like
    assert decompress(zeros, b"gzip", b"2", limit)[1] == 2
    small = gzip.compress(b"[" + b"0," * 2_000_000 + b"0]")
    assert len(decompress(small, b"gzip", None, limit)[0]) == 4_000_003


@pytest.mark.parametrize("value", [b"-1", b"x", b"", b"1.5", b"\xb2", b"9" * 20])
def test_a_json_length_that_is_no_number_is_refused(value: bytes) -> None:
    with pytest.raises(V2Error, match="send the number of bytes of the JSON"):
        parse_json_length(value, 10)


def test_a_json_length_beyond_the_body_is_refused() -> None:
    assert parse_json_length(None, 10) is None
    assert parse_json_length(b"10", 10) == 10
    with pytest.raises(V2Error, match="Inference-Header-Content-Length is 11, but the body has 10 bytes"):
        parse_json_length(b"11", 10)
