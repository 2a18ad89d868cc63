"""The signature in the message of a worker that becomes ready: whatever the schemas contain, the worker serves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortex.payloads.signature import ApiSignature, BodySignature, MethodSignature, parse_signature
from cortex.worker.worker_process import MAX_SIGNATURE_BYTES, signature_text


def signature(schema: Any) -> ApiSignature:
    return ApiSignature((MethodSignature("POST", "predict", BodySignature(schema), BodySignature()),))


def test_a_signature_arrives_as_it_is() -> None:
    made = signature({"type": "object", "title": "Größe"})
    assert parse_signature(signature_text(lambda: made)) == made


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"description": "x" * MAX_SIGNATURE_BYTES}, "longer than"),
        ({"description": "ß" * (MAX_SIGNATURE_BYTES // 4)}, "longer than"),  # six bytes each in the message
        ({"default": object()}, "can't be documented"),
        ({"default": 10**30}, "can't be documented"),
        ({"default": "\ud800"}, "can't be documented"),
    ],
)
def test_what_can_not_be_sent_is_left_out_with_a_log_line(
    capsys: pytest.CaptureFixture[str], schema: Any, reason: str
) -> None:
    assert signature_text(lambda: signature(schema)) == ""
    assert reason in "".join(capsys.readouterr())


def test_a_recursive_schema_is_left_out() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    assert signature_text(lambda: signature(schema)) == ""


def test_the_longest_signature_fits_into_a_message() -> None:
    text = signature_text(lambda: signature({"description": "x" * (MAX_SIGNATURE_BYTES - 500)}))
    assert 60_000 < len(json.dumps(text)) <= MAX_SIGNATURE_BYTES
