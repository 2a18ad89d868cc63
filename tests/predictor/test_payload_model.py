"""Methods with annotated payloads as inference models."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Annotated, Any

import numpy as np
import orjson
import pandas as pd
import pydantic
import pytest
from numpy.typing import NDArray

from cortex.errors import UserError
from cortex.payloads.annotated_arrays import Shape
from cortex.payloads.inference_protocol import V2Error
from cortex.payloads.inference_tensors import decode_request, encode_response
from cortex.payloads.signature import TensorSignature
from cortex.predictor.binding import bind_method
from cortex.predictor.inference.payload_model import PayloadModel, bind_payload_model, outputs_of
from cortex.predictor.interface import GENERATIONS

ROW = GENERATIONS["RealtimeAPI", "handler", "python", False]


class Iris(pydantic.BaseModel):
    width: float
    count: int
    name: str = "none"
    dried: bool = False


@dataclasses.dataclass
class Area:
    area: float
    label: str


class Handler:
    def of_array(self, payload: np.ndarray) -> Any:
        return payload * 2

    def of_shape(self, payload: Annotated[np.ndarray, Shape(-1, 2), "float32"]) -> Any:
        payload[0, 0] = 7
        return payload

    def of_frame(self, payload: pd.DataFrame) -> Any:
        return payload.assign(more=payload["a"] + 1)

    def of_rows(self, payload: Iris) -> Any:
        return Area(payload.width * payload.count, payload.name)

    async def of_async_rows(self, payload: Iris) -> Any:
        return payload.count

    def of_text(self, payload: NDArray[np.str_]) -> Any:
        return [text.upper() for text in payload.tolist()]

    def of_nested(self, payload: list[Iris]) -> Any:
        return payload

    def untyped(self, payload) -> Any:  # type: ignore[no-untyped-def]
        return payload

    def with_headers(self, payload: np.ndarray, headers: Any) -> Any:
        return payload


def bound(name: str) -> PayloadModel | None:
    return bind_payload_model("api", bind_method(Handler(), name, "POST", ROW))


def call(name: str, *inputs: dict[str, Any], parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request in JSON; return the data of the outputs by name."""
    model = bound(name)
    assert model is not None
    request = orjson.dumps({"inputs": inputs, "parameters": parameters or {}})
    header, decoded = decode_request(request, None, model.signature())
    outputs = model.call(decoded, {})
    if isinstance(outputs, Awaitable):
        awaited = outputs

        async def wait() -> Any:
            return await awaited

        outputs = asyncio.run(wait())
    body, _ = encode_response(header, outputs, model.signature(), "api", None)
    return {output["name"]: output["data"] for output in orjson.loads(body)["outputs"]}


def tensor(name: str, datatype: str, data: list[Any], *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data}


WIDTH, COUNT = tensor("width", "FP64", [1.5, 2]), tensor("count", "INT64", [2, 3])
REST = (tensor("name", "BYTES", ["a", "ä"]), tensor("dried", "BOOL", [True, False]))


def test_an_array_is_the_payload() -> None:
    assert call("of_array", tensor("any", "INT32", [1, 2])) == {"output": [2, 4]}
    with pytest.raises(V2Error, match="the payload is one array, but the request has 2 inputs"):
        call("of_array", WIDTH, COUNT)


def test_an_array_with_datatype_and_shape_is_described_and_writable() -> None:
    model = bound("of_shape")
    assert model is not None
    assert model.signature().inputs == (TensorSignature("payload", "FP32", (-1, 2)),)
    assert call("of_shape", tensor("payload", "FP32", [1, 2], 1, 2)) == {"output": [7, 2]}
    view = np.frombuffer(np.float32([1, 2]).tobytes(), np.float32).reshape(1, 2)
    assert np.asarray(model.infer({"payload": view}, None, ())["output"]).tolist() == [[7, 2]]  # type: ignore[index]
    with pytest.raises(V2Error, match=r"has the shape \[2\]; the model expects \[-1, 2\]"):
        call("of_shape", tensor("payload", "FP32", [1, 2]))


def test_inputs_are_the_columns_of_a_frame() -> None:
    columns = (tensor("a", "INT64", [1, 2], 2, 1), tensor("b", "BYTES", ["x", "y"]))
    assert call("of_frame", *columns) == {"a": [1, 2], "b": ["x", "y"], "more": [2, 3]}
    with pytest.raises(V2Error, match=r"input 'b' has the shape \[3\]; columns have \[2\] elements"):
        call("of_frame", columns[0], tensor("b", "INT64", [1, 2, 3]))


def test_each_row_of_scalars_is_one_payload() -> None:
    model = bound("of_rows")
    assert model is not None
    assert [(each.name, each.datatype, each.shape) for each in model.signature().inputs] == [
        ("width", "FP64", (-1,)),
        ("count", "INT64", (-1,)),
        ("name", "BYTES", (-1,)),
        ("dried", "BOOL", (-1,)),
    ]
    assert call("of_rows", WIDTH, COUNT, *REST) == {"area": [3.0, 6.0], "label": ["a", "ä"]}
    assert call("of_async_rows", WIDTH, COUNT, *REST) == {"output": [2, 3]}
    of_frame = [{**each, "shape": [2, 1]} for each in (WIDTH, COUNT, *REST)]
    assert call("of_rows", *of_frame, parameters={"content_type": "pd"})["area"] == [3.0, 6.0]


def test_fields_with_a_default_may_be_left_out() -> None:
    model = bound("of_rows")
    assert model is not None
    assert [each.name for each in model.signature().inputs if each.optional] == ["name", "dried"]
    assert call("of_rows", WIDTH, COUNT) == {"area": [3.0, 6.0], "label": ["none", "none"]}
    with pytest.raises(V2Error, match="input 'count' is missing"):
        call("of_rows", WIDTH, *REST)


def test_texts_are_str() -> None:
    assert call("of_text", tensor("t", "BYTES", ["ä"])) == {"output": ["Ä"]}


def test_a_row_that_is_refused_is_named() -> None:
    null = tensor("width", "FP64", [1, None])
    with pytest.raises(V2Error, match="row 1: .*width") as caught:
        call("of_rows", null, COUNT, *REST)
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["of_nested", "untyped", "with_headers"])
def test_other_methods_are_no_models(name: str) -> None:
    assert bound(name) is None


def test_a_result_without_tensors_is_an_error_of_the_users_code() -> None:
    model = bound("of_array")
    assert model is not None
    header, _ = decode_request(orjson.dumps({"inputs": [WIDTH]}), None, model.signature())

    with pytest.raises(UserError, match="output 'x' has an element of the type dict"):
        encode_response(header, outputs_of({"x": {"y": 1}}), model.signature(), "api", None)
