"""The example `llm-chat`, called directly: continuous batching, stops, streams and refusals."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from starlette.exceptions import HTTPException

from harness.installations.example_cases import EXAMPLES_DIR
from harness.wait import PATIENCE_S

FOLDER = EXAMPLES_DIR / "llm-chat"
MODULES = ("handler", "engine", "transformer")
CONFIG = {"model": "tiny-random", "max_sequences": 4, "context_tokens": 200}
HELLO = {"model": "tiny-random", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the module of the handler."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("handler")
    for name in MODULES:
        sys.modules.pop(name, None)


async def chat(handler: Any, module: ModuleType, **fields: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await handler.chat(module.ChatRequest(**{**HELLO, **fields}))


async def events(response: Any) -> list[Any]:
    lines = [line async for line in response.body_iterator]
    assert lines.pop() == "data: [DONE]\n\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def test_concurrent_answers_are_those_of_single_requests_and_share_steps(example: ModuleType) -> None:
    handler = example.Handler(CONFIG)
    prompts = [{"messages": [{"role": "user", "content": "a" * size}], "max_tokens": 10 * size} for size in (1, 2, 5)]
    alone = [await chat(handler, example, **fields) for fields in prompts]
    steps_alone, handler.engine.steps = handler.engine.steps, 0
    together = await asyncio.gather(*(chat(handler, example, **fields) for fields in prompts * 2))
    assert [content(each) for each in together] == [content(each) for each in alone] * 2
    assert handler.engine.largest_batch == 4  # the others waited for a slot
    assert handler.engine.steps < steps_alone
    assert not handler.engine._running


def test_a_cached_step_is_that_of_the_whole_text(example: ModuleType) -> None:
    transformer = importlib.import_module("transformer")
    model = transformer.Transformer(slots=2, max_tokens=20)
    tokens = transformer.encode("Hello")
    for position, token in enumerate(tokens):
        scores = model.step([1], [token], [position])
    for position, token in enumerate(tokens):  # beside a sequence of another length
        other = model.step([0, 1], [token, 7], [position, position + 5])
    assert np.allclose(scores[0], other[0], atol=1e-4)


async def test_an_answer_ends_before_its_first_stop_text_also_in_streams(example: ModuleType) -> None:
    handler = example.Handler(CONFIG)
    whole = content(await chat(handler, example, max_tokens=30))
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    stopped = await chat(handler, example, max_tokens=30, stop=[stop, "never"])
    assert (content(stopped), stopped["choices"][0]["finish_reason"]) == (expected, "stop")
    streamed = await events(
        await chat(handler, example, max_tokens=30, stop=stop, stream=True, stream_options={"include_usage": True})
    )
    pieces = [each["choices"][0]["delta"].get("content", "") for each in streamed[:-1]]
    assert "".join(pieces) == expected
    assert streamed[-2]["choices"][0]["finish_reason"] == "stop"
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"]["prompt_tokens"] == len("user: Hello!\nassistant: ")


async def test_a_client_that_leaves_frees_its_slot(example: ModuleType) -> None:
    handler = example.Handler({**CONFIG, "max_sequences": 1})
    response = await chat(handler, example, max_tokens=150, stream=True)
    iterator = response.body_iterator
    await anext(iterator)
    await anext(iterator)
    await iterator.aclose()
    assert content(await chat(handler, example, max_tokens=1))
    assert handler.engine.steps < 150


async def test_values_at_the_edge_are_answered_and_disturb_no_other_request(example: ModuleType) -> None:
    handler = example.Handler(CONFIG)
    names = ("temperature", "seed", "stop", "stream", "stream_options", "max_tokens")
    edges: list[dict[str, Any]] = [{"temperature": 1e-320}, {"seed": 10**30}, dict.fromkeys(names)]
    answers = await asyncio.gather(*(chat(handler, example, **{"max_tokens": 20, **each}) for each in edges))
    assert content(answers[0]) == content(await chat(handler, example, max_tokens=20))
    assert all(map(content, answers))


async def test_a_failed_step_fails_all_sequences_and_the_next_request_is_served(example: ModuleType) -> None:
    handler = example.Handler(CONFIG)
    step = handler.engine.model.step
    handler.engine.model.step = lambda *_: 1 / 0
    both = await asyncio.gather(*(chat(handler, example) for _ in range(2)), return_exceptions=True)
    assert [type(each) for each in both] == [ZeroDivisionError] * 2
    handler.engine.model.step = step
    assert content(await chat(handler, example, max_tokens=3))


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [({"model": "gpt-9"}, 404, "model_not_found"), ({"max_tokens": 500}, 400, "context_length_exceeded")],
)
def test_requests_that_cannot_be_answered_are_refused(
    example: ModuleType, fields: dict[str, Any], status: int, code: str
) -> None:
    with pytest.raises(HTTPException) as caught:
        asyncio.run(chat(example.Handler(CONFIG), example, **fields))
    assert (caught.value.status_code, caught.value.detail["code"]) == (status, code)


def test_the_readme_shows_how_to_call_it() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert "cortex deploy examples/llm-chat\n" in readme
    assert "localhost:8888/llm-chat/v1/chat/completions -d @examples/llm-chat/sample.json" in readme
    assert json.loads((FOLDER / "sample.json").read_text())["model"] in (FOLDER / "cortex.yaml").read_text()
