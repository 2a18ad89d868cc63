"""Submissions to a TaskAPI: accepted and ignored fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortex.errors import SubmissionError
from cortex.jobs.intake.submission import SubmissionLimits, parse_body
from cortex.jobs.spec import ItemList, JobOptions, Submission, TaskCall, source_from_json, source_to_json

LIMITS = SubmissionLimits(is_task=True)


def parse(**body: Any) -> Submission:
    return parse_body(json.dumps(body).encode(), LIMITS)


@pytest.mark.parametrize(
    "body", [b"", b" \n", b"{}", b'{"workers": 1}', b'{"config": null, "item_list": {"items": []}}']
)
def test_nothing_has_to_be_said(body: bytes) -> None:
    assert parse_body(body, LIMITS) == Submission(TaskCall(), JobOptions(workers=1, max_attempts=1))


def test_all_fields_are_read() -> None:
    found = parse(config={"a": {"b": 1}}, timeout=60, workers=1, max_attempts=3, webhook="https://host/done")
    assert found.options == JobOptions(1, {"a": {"b": 1}}, 60, max_attempts=3, webhook="https://host/done")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"workers": 2}, 'workers: must be at most 1 (got 2); write "workers": 1, or leave it out'),
        ({"workers": "1"}, "workers: must be an integer"),
        ({"timeout": 0}, "timeout: must be at least 1 (got 0)"),
        ({"config": [1]}, "config: must be a map"),
        ({"max_attempts": 0}, "max_attempts: must be at least 1"),
        ({"webhook": "host"}, "webhook: must be an http:// or https:// address"),
    ],
)
def test_a_field_that_is_wrong_is_named_with_its_fix(body: dict[str, Any], message: str) -> None:
    with pytest.raises(SubmissionError) as error:
        parse(**body)
    assert str(error.value).startswith(message)


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(SubmissionError) as error:
        parse(workers=3, timeout="soon", config=7)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["workers", "config", "timeout"]


@pytest.mark.parametrize("body", [b"[1]", b"{", b'{"config": {}}\n{"config": {}}'])
def test_a_body_that_is_no_map_is_refused_with_an_example_of_a_task(body: bytes) -> None:
    with pytest.raises(SubmissionError, match="config") as error:
        parse_body(body, LIMITS)
    assert "item_list" not in str(error.value) and "x-ndjson" not in str(error.value)


def test_an_api_of_batches_is_read_as_such() -> None:
    body = {"workers": 2, "item_list": {"items": [1]}}
    assert parse_body(body, SubmissionLimits()).source == ItemList([1], 1)


def test_the_source_comes_back_from_its_json() -> None:
    stored = json.loads(json.dumps(source_to_json(TaskCall()) | {"scheduled_for": 1.0}))
    assert source_from_json(stored) == TaskCall()
