"""Requests of the Open Inference Protocol to real replicas, as the gateway sends them."""

from __future__ import annotations

import gzip
import struct
from typing import Any

import orjson
import pytest

from harness.replicas.replicas import Answer, Replica, new_request_id, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    import asyncio, os, threading
    import numpy as np

    class Handler:
        def __init__(self, config):
            self.inside = 0

        def handle_post(self, payload):
            return {"payload": payload}

        def handle_v2(self, inputs, parameters):
            action = parameters.get("action")
            if action == "array":
                return inputs["x"] * 2
            if action == "none":
                return None
            if action == "raise":
                raise KeyError("secret")
            if action == "sleep":
                threading.Event().wait(30)
            if action == "exit":
                os._exit(3)
            if action == "parameters":
                return {"said": [repr(sorted(parameters.items()))]}
            return {"sum": inputs["x"].sum(axis=1), "text": np.array([b"a"])}
"""
X = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}


def call(replica: Replica, path: str, body: Any = None, *, method: str = "", **headers: str) -> Answer:
    """Send a request as the gateway does for paths below `/api`."""
    data = body if isinstance(body, bytes) else None if body is None else orjson.dumps(body)
    sent = {"x-cortex-endpoint": "/api"} | {name.replace("_", "-"): value for name, value in headers.items()}
    verb = method or ("GET" if body is None else "POST")
    return replica.request(method=verb, path=f"/api{path}", body=data, headers=sent)


def infer(replica: Replica, request: Any, **headers: str) -> Answer:
    return call(replica, "/v2/models/api/infer", request, **headers)


def arrived_long_ago() -> dict[str, str]:
    """Return the header of a request whose timeout of 15 seconds has almost passed."""
    return {"x-cortex-request-id": new_request_id(ago_s=12)}


@pytest.fixture(scope="module")
def replica() -> Any:
    with running_replica(SOURCE, timeout_s=60, max_body_bytes=10_000) as started:
        started.wait_ready()
        yield started


def test_a_class_answers_tensors_and_its_other_methods_answer_as_before(replica: Replica) -> None:
    answer = infer(replica, {"id": "7", "inputs": [X]})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "model_name": "api",
        "id": "7",
        "outputs": [
            {"name": "sum", "shape": [2], "datatype": "FP32", "data": [3.0, 7.0]},
            {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]},
        ],
    }
    assert replica.request([1]).json == {"payload": [1]}
    only = infer(replica, {"inputs": [X], "outputs": [{"name": "text"}]})
    assert [output["name"] for output in only.json["outputs"]] == ["text"]
    array = infer(replica, {"inputs": [X], "parameters": {"action": "array"}})
    assert array.json["outputs"] == [{"name": "output", "shape": [2, 2], "datatype": "FP32", "data": [2, 4, 6, 8]}]


def test_binary_tensors_and_compressed_bodies_are_answered_in_kind(replica: Replica) -> None:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    body = text + struct.pack("<2f", 1.5, 2.5)
    length = str(len(text))
    for sent, encoding in ((body, {}), (gzip.compress(body), {"content_encoding": "gzip"})):
        answer = infer(replica, sent, inference_header_content_length=length, **encoding)
        assert answer.headers["content-type"] == "application/octet-stream"
        size = int(answer.headers["inference-header-content-length"])
        assert answer.headers["access-control-expose-headers"] == "Inference-Header-Content-Length"
        assert orjson.loads(answer.body[:size])["outputs"][0]["parameters"] == {"binary_data_size": 4}
        assert answer.body[size:] == struct.pack("<f", 4) + struct.pack("<I", 1) + b"a"
    bomb = gzip.compress(b" " * 1_000_000)
    assert infer(replica, bomb, content_encoding="gzip").status == 413


def test_metadata_and_health_are_json(replica: Replica) -> None:
    assert call(replica, "/v2").json["extensions"] == ["binary_tensor_data"]
    assert call(replica, "/v2/health/live").json == {"live": True}
    assert call(replica, "/v2/health/ready").json == {"ready": True}
    assert call(replica, "/v2/models").json == {"models": ["api"]}
    assert call(replica, "/v2/models/api/ready").json == {"name": "api", "ready": True}
    assert call(replica, "/v2/models/api").json == {"name": "api", "platform": "python", "inputs": [], "outputs": []}
    assert call(replica, "/v2/models", x_cortex_splitter="ab").json == {"models": ["ab"]}
    assert call(replica, "/v2/models/ab/ready", x_cortex_splitter="ab").json == {"name": "ab", "ready": True}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2/nothing", None, 404, "'v2/nothing' is not a path of the Open Inference Protocol"),
        ("/v2/models/iris", None, 404, "the API api has no model 'iris'; its models are api"),
        ("/v2/models/api/versions/2", None, 404, "the model 'api' has no version '2'; it has no versions"),
        ("/v2/models/api/versions/2/infer", {"inputs": [X]}, 404, "the model 'api' has no version '2'"),
        ("/v2/models/api/infer", None, 405, "GET is not supported at this path; it answers POST"),
        ("/v2/models/api", {}, 405, "POST is not supported at this path; it answers GET"),
        ("/v2/models/api/infer", {}, 400, "the request has no inputs"),
        ("/v2/models/api/infer", b"\xff\0", 400, "malformed JSON"),
        (
            "/v2/models/api/infer",
            {"inputs": [X], "outputs": [{"name": "y"}]},
            400,
            "has no output 'y'; its outputs are",
        ),
        (
            "/v2/models/api/infer",
            {"inputs": [X], "parameters": {"action": "none"}},
            500,
            "returned a NoneType; return a",
        ),
        ("/v2/models/api/infer", {"inputs": [X], "parameters": {"action": "raise"}}, 500, "KeyError in handle_v2()"),
    ],
)
def test_every_error_is_an_object_with_the_reason(
    replica: Replica, path: str, body: Any, status: int, message: str
) -> None:
    answer = call(replica, path, body)
    assert answer.status == status
    assert message in answer.json["error"]
    assert answer.json.keys() == {"error", "request_id"}
    assert "secret" not in answer.json["error"]


def test_parameters_reach_the_class(replica: Replica) -> None:
    answer = infer(replica, {"inputs": [X], "parameters": {"action": "parameters", "priority": 3}})
    assert answer.json["outputs"][0]["data"] == ["[('action', 'parameters'), ('priority', 3)]"]


def test_errors_of_user_code_are_logged_with_their_frames(replica: Replica) -> None:
    answer = infer(replica, {"inputs": [X], "parameters": {"action": "raise"}})
    request_id = answer.json["request_id"]
    wait_until(lambda: f"request {request_id} failed" in replica.log(), message="the log has the failed request")
    wait_until(lambda: 'raise KeyError("secret")' in replica.log())


def test_an_async_method_may_be_the_only_one_of_its_class() -> None:
    source = """
        import asyncio

        class Handler:
            def __init__(self, config):
                self.arrived = asyncio.Event()

            async def handle_v2(self, inputs):
                if "wait" in inputs:
                    await self.arrived.wait()
                self.arrived.set()
                return {"y": inputs["x"]}
    """
    with running_replica(source, timeout_s=15) as replica:
        replica.wait_ready()
        late = infer(replica, {"inputs": [X, {**X, "name": "wait"}]}, **arrived_long_ago())
        assert (late.status, late.json["error"]) == (504, "timed out after 15 s")
        assert infer(replica, {"inputs": [X]}).json["outputs"][0]["data"] == [1, 2, 3, 4]
        post = replica.request([1])
        assert (post.status, "Open Inference Protocol at /v2" in post.json["error"]) == (405, True)


def test_an_annotated_method_answers_tensors_and_numpy_is_imported_for_the_first_of_them() -> None:
    source = """
        import sys
        from pydantic import BaseModel

        class Flower(BaseModel):
            width: float
            length: float

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload: Flower):
                return {"area": payload.width * payload.length, "numpy": "numpy" in sys.modules}
    """
    columns = [
        {"name": "width", "shape": [2], "datatype": "FP64", "data": [1.5, 2]},
        {"name": "length", "shape": [2], "datatype": "FP64", "data": [2, 4]},
    ]
    with running_replica(source) as replica:
        replica.wait_ready()
        assert replica.request({"width": 1, "length": 2}).json == {"area": 2.0, "numpy": False}
        metadata = call(replica, "/v2/models/api").json
        assert metadata["inputs"][0] == {"name": "width", "datatype": "FP64", "shape": [-1]}
        assert infer(replica, {"inputs": columns}).json["outputs"][0]["data"] == [3.0, 8.0]


def test_a_class_without_the_method_says_how_to_get_a_model() -> None:
    source = """
        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self):
                return 1
    """
    with running_replica(source) as replica:
        replica.wait_ready()
        answer = infer(replica, {"inputs": [X]})
        assert "the API api has no model of the Open Inference Protocol; define handle_v2(), or" in answer.json["error"]
        assert call(replica, "/v2/models").json == {"models": []}


def test_calls_have_deadlines_and_deaths_have_reasons() -> None:
    with running_replica(SOURCE, timeout_s=15) as replica:
        replica.wait_ready()
        late = infer(replica, {"inputs": [X], "parameters": {"action": "sleep"}}, **arrived_long_ago())
        assert late.status in (500, 504)
        assert "timed out after 15 s" in late.json["error"]
        wait_until(lambda: infer(replica, {"inputs": [X]}).status == 200, message="the process is replaced")
        died = infer(replica, {"inputs": [X], "parameters": {"action": "exit"}})
        assert (died.status, "exited with code 3" in died.json["error"]) == (500, True), died.json
