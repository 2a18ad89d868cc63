"""The arguments that a request needs, read from the user's file."""

from __future__ import annotations

import textwrap

import pytest

from cortex.predictor.checks.request_arguments import RequestArguments, request_arguments

IRIS = """
    class PythonPredictor:
        def predict(self, payload):
            names = {"a": 1}
            return self.model([payload["length"], payload["width"], payload["length"], names["a"], payload.get("top")])
"""
FUNCTIONS = """
    def predict(sample, metadata):
        sample["label"] = metadata["x"]
        return sample["text"]
"""
GET_ONLY = """
    class Handler:
        def handle_get(self, query_params):
            return query_params["a"]
"""
POST_FIRST = """
    class Handler:
        def handle_get(self):
            return 1

        async def handle_post(self, *, payload: dict):
            return payload
"""
INHERITED = """
    from base import Base

    class Handler(Base):
        pass
"""


@pytest.mark.parametrize(
    ("interface", "text", "expected"),
    [
        ("predictor", IRIS, RequestArguments("POST", ("length", "width"))),
        ("functions", FUNCTIONS, RequestArguments("POST", ("text",))),
        ("handler", GET_ONLY, RequestArguments("GET", None, ("a",))),
        ("handler", POST_FIRST, RequestArguments("POST", ())),
        ("handler", INHERITED, None),
        ("handler", "from model import Handler", None),
        ("handler", "def broken(:", None),
    ],
)
def test_a_request_needs_what_the_first_method_reads(
    interface: str, text: str, expected: RequestArguments | None
) -> None:
    assert request_arguments(textwrap.dedent(text), interface, "python", False, "RealtimeAPI") == expected


def test_a_workload_is_sent_with_post() -> None:
    text = "class Handler:\n def handle_async(self, payload): return payload['url']"
    assert request_arguments(text, "handler", "python", False, "AsyncAPI") == RequestArguments("POST", ("url",))
