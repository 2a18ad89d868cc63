"""The audit of jobs detects each kind of loss and doubling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.installations.job_audit import mistakes

Data = dict[str, Any]


def good() -> Data:
    """Twelve items in batches of four; 5 was isolated: batch 1 gave way to 3 (4, 5) and 4 (6, 7), 3 to 5 and 6."""
    results = [(0, 0, 4), (2, 8, 4), (4, 6, 2), (5, 4, 1)]
    status = {"status": "completed_with_failures", "total_batch_count": 5, "batches_in_queue": 0, "results": 4}
    status |= {"dead_letters": 1, "items": {"total": 12, "succeeded": 11, "failed": 1}}
    status |= {"batch_metrics": {"succeeded": 4, "failed": 1, "average_time_per_batch": 0.1}}
    return {
        "items": 12,
        "guilty": {5},
        "status": status,
        "results": [
            {"seq": seq, "first_item": first, "items": count, "result": list(range(first, first + count))}
            for seq, first, count in results
        ],
        "dead_letters": [{"seq": 6, "first_item": 5, "items": 1, "payload": [5]}],
    }


def test_correct_job_has_no_mistakes() -> None:
    assert mistakes(**good()) == []


def lose(data: Data) -> None:
    del data["results"][1]


def double(data: Data) -> None:
    data["results"].append({**data["results"][0], "seq": 9})


def record_twice(data: Data) -> None:
    data["results"].append(data["results"][0])


def blame(data: Data) -> None:
    letter = data["results"].pop()
    data["dead_letters"].append({**letter, "payload": letter["result"]})


def acquit(data: Data) -> None:
    letter = data["dead_letters"].pop()
    data["results"].append({**letter, "result": letter["payload"]})


def mix_up(data: Data) -> None:
    data["results"][0]["result"], data["results"][1]["result"] = [8, 9, 10, 11], [0, 1, 2, 3]


def miscount(data: Data) -> None:
    data["status"]["batch_metrics"]["succeeded"] += 1


def end_otherwise(data: Data) -> None:
    data["status"]["status"] = "succeeded"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose, "never recorded: 4 (8, 9, 10, 11)"),
        (double, "recorded more than once: 4"),
        (record_twice, "a batch with two outcomes: 1 (0)"),
        (blame, "a dead letter, and innocent: 1 (4)"),
        (acquit, "guilty, and no dead letter: 1 (5)"),
        (mix_up, "a batch whose result is not its items: 2"),
        (miscount, "batch_metrics are"),
        (end_otherwise, "status is succeeded"),
    ],
)
def test_each_kind_of_mistake_is_found(spoil: Callable[[Data], None], words: str) -> None:
    data = good()
    spoil(data)
    assert words in "\n".join(mistakes(**data))
