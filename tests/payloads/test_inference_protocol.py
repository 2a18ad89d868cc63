"""Routes, documents and bodies of the Open Inference Protocol, without tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.payloads.inference_protocol import (
    InferenceRoute,
    V2Error,
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


@pytest.mark.parametrize("value", [b"-1", b"x", b"", b"1.5", b"\xb2", b"9" * 20])
def test_a_json_length_that_is_no_number_is_refused(value: bytes) -> None:
    with pytest.raises(V2Error, match="send the number of bytes of the JSON"):
        parse_json_length(value, 10)


def test_a_json_length_beyond_the_body_is_refused() -> None:
    assert parse_json_length(None, 10) is None
    assert parse_json_length(b"10", 10) == 10
    with pytest.raises(V2Error, match="Inference-Header-Content-Length is 11, but the body has 10 bytes"):
        parse_json_length(b"11", 10)
