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


def test_a_class_that_answers_only_tensors_needs_no_other_method(project: UserProject) -> None:
    text = BASE + HIDDEN.format(methods="{'handle_v2': lambda self, inputs: inputs}")
    assert project.load("handler", text, max_batch_size=8).inference_models.keys() == {"iris"}
