"""Batching without a method that it could call is a mistake, for the loader as for the check of the source."""

from __future__ import annotations

import pytest

from cortex.errors import UserError
from harness.models.user_project import UserProject

BASE = "class Base:\n    def __init__(self, config): ...\n"
#: What the check of the source can't see through.
HIDDEN = "\nHandler = type('Handler', (Base,), {methods})\n"


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("{'handle_get': lambda self: 1}", "requires handle_post(), which is not defined; add it"),
        ("{'handle_post': stream}", "can't combine calls of handle_post(), which streams its responses; return a list"),
        (
            "{'handle_post': astream}",
            "can't combine calls of handle_post(), which streams its responses; return a list",
        ),
    ],
)
def test_server_side_batching_requires_a_method_that_does_not_stream(
    project: UserProject, methods: str, words: str
) -> None:
    streams = "def stream(self, payload):\n    yield 1\nasync def astream(self, payload):\n    yield 1\n"
    text = BASE + streams + HIDDEN.format(methods=methods)
    with pytest.raises(UserError, match="^predictor.py: class Handler: server_side_batching ") as raised:
        project.load("handler", text, max_batch_size=8)
    assert words in str(raised.value)


@pytest.mark.parametrize("start", ["async def batch_key(self, payload): return", "def batch_key(self, payload): yield"])
def test_a_batch_key_is_a_plain_function(project: UserProject, start: str) -> None:
    text = f"{BASE}    def handle_post(self, payload): ...\n    {start} 1\nHandler = Base\n"
    with pytest.raises(UserError, match=r"^predictor.py: class Handler: batch_key\(\) runs on the event loop"):
        project.load("handler", text, max_batch_size=8)
    assert project.load("handler", text).batch_key is None, "it is not used without server-side batching"


def test_a_batch_key_receives_the_payload_of_a_method_that_does_not(project: UserProject) -> None:
    text = BASE + HIDDEN.format(
        methods="{'handle_post': lambda self, headers: 1, 'batch_key': lambda self, payload: 2}"
    )
    loaded = project.load("handler", text, max_batch_size=8)
    assert loaded.methods["POST"].needs_payload
    assert loaded.batch_key is not None
    assert loaded.batch_key(payload=1) == 2


def test_a_class_that_answers_only_tensors_needs_no_other_method(project: UserProject) -> None:
    text = BASE + HIDDEN.format(methods="{'handle_v2': lambda self, inputs: inputs}")
    assert project.load("handler", text, max_batch_size=8).inference_models.keys() == {"iris"}
