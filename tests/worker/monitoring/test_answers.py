"""Digests of answers: what agrees, and where they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.worker.monitoring.answers import (
    ANSWERS_FOLDER,
    MAX_ANSWER_BYTES,
    AnswerDigests,
    answer_digest,
    answers_agree,
)
from cortex.worker.monitoring.metrics import COPIES_FOLDER
from cortex.worker.monitoring.tracker import PredictionKind, read_predictions

JSON, TEXT = b"application/json", b"text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("media_type", "old", "new", "expected"),
    [
        (JSON, b'{"a":1,"b":[true,null,"x"]}', b'{"b": [true, null, "x"], "a": 1}', True),
        (JSON, b'{"a":1}', b'{"a":2}', False),
        (JSON, b'{"a":1}', b'{"a":1,"b":1}', False),
        (JSON, b"[1,2]", b"[2,1]", False),
        (JSON, b"[100001]", b"[100002]", False),  # integers are exact
        (JSON, b'"0.5"', b"0.5", False),
        (JSON, b"[0.5]", b"[0.50000001]", True),
        (JSON, b"[0.123499999]", b"[0.123500001]", True),  # a boundary of the rounding lies between them
        (JSON, b"[-0.12999999]", b"[-0.13000001]", True),  # a boundary of the truncation
        (JSON, b"[0.99999999]", b"[1.00000001]", True),
        (JSON, b"[9e-9]", b"[-3e-12]", True),  # both are 0
        (JSON, b"[0.5]", b"[0.51]", False),
        (JSON, b"[0.5]", b"[-0.5]", False),
        (JSON, b"[1e200]", b"[1e201]", False),
        (JSON, b"[" * 2000, b"[" * 2000, True),  # neither is JSON
        (TEXT, b"cat", b"cat", True),
        (TEXT, b"0.5", b"0.50000001", False),
        (None, b"", b"", True),
    ],
)
def test_answers_agree_if_their_values_do(media_type: bytes | None, old: bytes, new: bytes, expected: bool) -> None:
    assert answers_agree(answer_digest(media_type, old), answer_digest(media_type, new)) is expected


def test_digests_of_copies_are_apart_and_long_answers_have_none(tmp_path: Path) -> None:
    digests = AnswerDigests(tmp_path)
    digests.add(b"1", JSON, b"[1]", is_copy=False)
    digests.add(b"1", JSON, b"[2]", is_copy=True)
    digests.add(b"2", TEXT, b"x" * (MAX_ANSWER_BYTES + 1), is_copy=False)
    found = [
        read_predictions(folder / ANSWERS_FOLDER / "0", PredictionKind.ANSWER, 0)
        for folder in (tmp_path, tmp_path / COPIES_FOLDER)
    ]
    assert [(count, list(values.values())) for count, values in found] == [
        (1, [answer_digest(JSON, b"[1]")]),
        (1, [answer_digest(JSON, b"[2]")]),
    ]
