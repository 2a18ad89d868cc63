"""Requests to methods that annotate their payload, and exceptions that choose the response, in real replicas."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from harness.replicas.replicas import Replica, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

TYPED = """
    import dataclasses
    from typing import Annotated

    import numpy as np
    import pandas as pd
    from PIL import Image
    from pydantic import BaseModel, Field
    from starlette.exceptions import HTTPException

    class Iris(BaseModel):
        sepal_length: float = Field(gt=0)

    class Prediction(BaseModel):
        label: str = Field(alias="class")
        scores: Annotated[np.ndarray, "not known to pydantic"] = None

        model_config = {"arbitrary_types_allowed": True, "populate_by_name": True}

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload: Iris, headers) -> Prediction:
            if payload.sepal_length == 404:
                raise HTTPException(404, "no such flower", {"x-flower": "none", "content-type": "text/html"})
            return Prediction(label=type(payload).__name__, scores=np.array([payload.sepal_length, np.nan]))

        def handle_put(self, payload: np.ndarray):
            return {"shape": payload.shape, "sum": payload.sum()}

        def handle_patch(self, payload: Image.Image) -> Image.Image:
            return payload.transpose(Image.Transpose.ROTATE_90)

        def handle_delete(self, payload: pd.DataFrame = None):
            return payload if payload is not None else "all"
"""


def without_id(answer: Any) -> dict[str, Any]:
    body = answer.json
    assert body.pop("request_id")
    return body


def test_payloads_are_what_the_method_annotates() -> None:
    with running_replica(TYPED) as replica:
        replica.wait_ready()
        for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}):
            answer = replica.request(body=b'{"sepal_length": "5.5"}', headers=headers)
            assert answer.json == {"class": "Iris", "scores": [5.5, None]}, headers
        form = replica.request(body=b"sepal_length=5.5", headers={"content-type": "application/x-www-form-urlencoded"})
        assert form.json["scores"] == [5.5, None]

        wrong = replica.request({"sepal_length": -1})
        assert wrong.status == 422
        assert without_id(wrong) == {
            "error": "payload.sepal_length: Input should be greater than 0",
            "detail": [
                {
                    "type": "greater_than",
                    "loc": ["body", "sepal_length"],
                    "msg": "Input should be greater than 0",
                    "ctx": {"gt": 0.0},
                }
            ],
        }
        empty = replica.request(body=b"", headers={"content-type": "application/json"})
        assert (empty.status, empty.json["error"]) == (422, "payload: the body is empty")
        for body in (b"{", b'{"sepal_length": NaN}', b'{"sepal_length": 1e999}', b"[" * 100_000):
            broken = replica.request(body=body)
            assert broken.status == 400
            assert broken.json["error"].startswith("malformed JSON: ")
        curl = replica.request(
            body=b' {"sepal_length": 5', headers={"content-type": "application/x-www-form-urlencoded"}
        )
        assert (curl.status, curl.json["error"][:16]) == (400, "malformed JSON: ")

        refused = replica.request({"sepal_length": 404})
        assert (refused.status, refused.headers["x-flower"]) == (404, "none")
        assert refused.headers["content-type"] == "application/json"
        assert without_id(refused) == {"error": "no such flower", "detail": "no such flower"}

        assert replica.request([[1, 2], [3, 4.5]], method="PUT").json == {"shape": [2, 2], "sum": 10.5}
        assert replica.request(method="DELETE").body == b"all"
        rows = [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
        assert replica.request(rows, method="DELETE").json == rows
        csv = replica.request(body=b"a,b\n1,\n2,x\n", method="DELETE", headers={"content-type": "text/csv"})
        assert csv.json == rows

        file = io.BytesIO()
        Image.new("CMYK", (3, 2)).save(file, "JPEG")
        turned = replica.request(body=file.getvalue(), method="PATCH", headers={"content-type": "image/jpeg"})
        assert turned.headers["content-type"] == "image/png"
        assert Image.open(io.BytesIO(turned.body)).size == (2, 3)
        assert replica.request(body=b"GIF89a", method="PATCH", headers={"content-type": "image/gif"}).status == 422
        wait_until(lambda: "was refused: 404: no such flower" in replica.log(), message="the log has the exception")
        assert "Traceback" not in replica.log()


@pytest.mark.parametrize("interface", ["predictor", "functions"])
def test_older_generations_ignore_annotations(interface: str) -> None:
    source = {
        "predictor": """
            class PythonPredictor:
                def __init__(self, config):
                    pass

                def predict(self, payload: dict[str, int]):
                    return payload
        """,
        "functions": """
            def predict(sample: int, metadata):
                return sample
        """,
    }[interface]
    with running_replica(source, interface=interface) as replica:
        replica.wait_ready()
        assert replica.request(["x"]).json == ["x"]


EXCEPTIONS = """
    import asyncio

    from starlette.exceptions import HTTPException

    class Teapot(HTTPException):
        pass

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            raise Teapot(payload["status"], **payload["more"])

        async def handle_put(self, payload):
            await asyncio.sleep(0)
            raise Teapot(418, {"brew": "tea"})

        def handle_patch(self, payload):
            if payload:
                yield "one"
            raise Teapot(429, "slow down", {"retry-after": "3"})

        async def handle_delete(self):
            raise Teapot(503, "warming up")
            yield

        def handle_get(self):
            raise Teapot(204)
"""


@pytest.fixture(scope="module")
def exceptions() -> Any:
    with running_replica(EXCEPTIONS) as replica:
        replica.wait_ready()
        yield replica


@pytest.mark.parametrize(
    ("payload", "status", "body"),
    [
        ({"status": 400, "more": {"detail": "bad"}}, 400, {"error": "bad", "detail": "bad"}),
        ({"status": 507, "more": {"detail": "disk full"}}, 507, {"error": "disk full", "detail": "disk full"}),
        (
            {"status": 422, "more": {"detail": [{"loc": ["x"]}]}},
            422,
            {"error": "Unprocessable", "detail": [{"loc": ["x"]}]},
        ),
        ({"status": 404, "more": {}}, 404, {"error": "Not Found", "detail": "Not Found"}),
        ({"status": 499, "more": {"detail": {"a": 1}}}, 499, {"error": "status 499", "detail": {"a": 1}}),
        ({"status": 404, "more": {"headers": {"a b": "c"}}}, 500, None),
        ({"status": 42, "more": {"detail": "x"}}, 500, None),
    ],
)
def test_an_http_exception_is_the_response(exceptions: Replica, payload: Any, status: int, body: Any) -> None:
    answer = exceptions.request(payload)
    assert answer.status == status
    if body is None:
        assert answer.json["error"].startswith("internal server error: invalid HTTPException")
    else:
        found = without_id(answer)
        assert found["detail"] == body["detail"]
        assert found["error"].startswith(body["error"])


def test_an_http_exception_is_the_response_of_all_kinds_of_methods(exceptions: Replica) -> None:
    coroutine = exceptions.request({}, method="PUT")
    assert (coroutine.status, coroutine.json["error"], coroutine.json["detail"]) == (
        418,
        "I'm a Teapot",
        {"brew": "tea"},
    )
    generator = exceptions.request([], method="PATCH")
    assert (generator.status, generator.json["detail"], generator.headers["retry-after"]) == (429, "slow down", "3")
    async_generator = exceptions.request(method="DELETE")
    assert (async_generator.status, async_generator.json["detail"]) == (503, "warming up")
    nothing = exceptions.request(method="GET")
    assert (nothing.status, nothing.body) == (204, b"")
    assert "Traceback" not in exceptions.log()


BATCHED = """
    from pydantic import BaseModel
    from starlette.exceptions import HTTPException

    class Item(BaseModel):
        x: int

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload: list[Item]) -> list[Item]:
            if any(item.x < 0 for item in payload):
                raise HTTPException(409, "negative")
            return [Item(x=item.x + 1) for item in payload]
"""


def test_with_server_side_batching_each_request_is_one_item() -> None:
    with running_replica(BATCHED, max_batch_size=8, batch_interval_s=0.01) as replica:
        replica.wait_ready()
        assert replica.request({"x": 1}).json == {"x": 2}
        wrong = replica.request({"x": "one"})
        assert wrong.status == 422
        assert wrong.json["error"].startswith("payload.x: Input should be a valid integer")
        assert replica.request({"x": -1}).status == 409
        assert replica.request([{"x": 1}]).status == 422


def test_the_readiness_sample_is_validated() -> None:
    source = """
        import pathlib

        pathlib.Path("sample.json").write_text('{"x": "one"}')

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload: dict[str, int]):
                return payload
    """
    with running_replica(source, readiness="sample.json") as replica:
        failure = next(found for found in iter(lambda: replica.status().processes[0].failure, 0) if found)
        assert failure.message == (
            "the readiness sample sample.json failed: payload.x: Input should be a valid integer,"
            " unable to parse string as an integer"
        )
