"""`handle_v2` of a class: its checks at deploy and at load, and its results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from cortex.errors import UserError
from cortex.predictor.checks.source_checks import check_source
from cortex.predictor.inference.inference_model import MethodModel
from cortex.predictor.interface import GENERATIONS, HANDLE_V2

ROW = GENERATIONS["RealtimeAPI", "handler", "python", False]
SIGNATURE = ROW.hooks[HANDLE_V2]
CLASS = "class Handler:\n    def __init__(self, config):\n        pass\n\n"


def bound(method: Any) -> MethodModel:
    return MethodModel("iris", method, SIGNATURE, in_scope=False)


def messages(body: str) -> list[str]:
    return [found.message for found in check_source(CLASS + body, "handler.py", "handler")]


def test_a_method_gets_the_inputs_and_declared_parameters() -> None:
    x = np.array([1, 2])
    assert bound(lambda inputs: inputs).call({"x": x}, {"a": 1}) == {"x": x}
    assert bound(lambda inputs, parameters: {"y": parameters}).call({}, {"a": 1}) == {"y": {"a": 1}}
    assert bound(lambda inputs: inputs["x"]).infer({"x": x}, None, ()) == {"output": x}


def test_an_async_method_is_awaited() -> None:
    async def handle(inputs: Any) -> Any:
        return inputs["x"]

    model = bound(handle)
    result = model.call({"x": np.array([1])}, {})
    assert isinstance(result, Awaitable)
    assert model.kind == "async"

    async def wait() -> Any:
        return await result

    assert asyncio.run(wait())["output"].tolist() == [1]


@pytest.mark.parametrize(("result", "kind"), [(None, "a NoneType"), (3, "an int"), ([1], "a list"), ("x", "a str")])
def test_a_result_that_is_no_array_is_named(result: object, kind: str) -> None:
    with pytest.raises(UserError, match=f"handle_v2\\(\\) returned {kind}; return a dict of arrays, or an array"):
        bound(lambda inputs: result).call({}, {})


def test_a_method_that_yields_is_refused() -> None:
    def handle(inputs: Any) -> Any:
        yield inputs

    with pytest.raises(UserError, match="yields; return a dict of arrays instead"):
        bound(handle)


def test_a_class_may_define_only_this_method() -> None:
    assert messages("    def handle_v2(self, inputs):\n        return inputs\n") == []


def test_a_wrong_signature_is_found_before_the_code_runs() -> None:
    [wrong] = messages("    def handle_v2(self, payload):\n        return payload\n")[:1]
    assert 'invalid signature for method "handle_v2(self, payload)"' in wrong


def test_only_current_realtime_classes_have_the_method() -> None:
    having = {(kind, interface) for (kind, interface, _, _), row in GENERATIONS.items() if HANDLE_V2 in row.hooks}
    assert having == {("RealtimeAPI", "handler")}
    for row in GENERATIONS.values():
        assert (row.inference_method is not None) == (HANDLE_V2 in row.hooks)
