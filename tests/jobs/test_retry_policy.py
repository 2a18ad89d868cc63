from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.jobs.retry_policy import FailedBatch, FailureAction, delay_s, failure_action, split_payload
from cortex.jobs.spec import BatchFailure


@pytest.mark.parametrize(
    ("attempts", "items", "is_part", "isolate", "expected"),
    [
        (1, 1, False, False, FailureAction.RETRY),
        (2, 1, False, False, FailureAction.RETRY),
        (3, 1, False, False, FailureAction.DEAD_LETTER),
        (4, 1, False, False, FailureAction.DEAD_LETTER),
        (2, 9, False, True, FailureAction.RETRY),
        (3, 9, False, False, FailureAction.DEAD_LETTER),
        (3, 9, False, True, FailureAction.SPLIT),
        (3, 1, False, True, FailureAction.DEAD_LETTER),
        (1, 2, True, True, FailureAction.SPLIT),
        (1, 1, True, True, FailureAction.RETRY),
        (3, 1, True, True, FailureAction.DEAD_LETTER),
    ],
)
def test_a_failed_batch_is_retried_then_split_or_becomes_a_dead_letter(
    attempts: int, items: int, is_part: bool, isolate: bool, expected: FailureAction
) -> None:
    failed = FailedBatch(BatchFailure(0, "ValueError"), attempts, is_part, items)
    assert failure_action(failed, max_attempts=3, isolate_failures=isolate) is expected


def test_delays_grow_up_to_a_minute() -> None:
    assert [delay_s(attempts) for attempts in (1, 2, 3, 4, 5, 6, 1000)] == [1, 3, 9, 27, 60, 60, 60]


@pytest.mark.parametrize(
    ("payload", "items", "expected"),
    [
        (b"[1,2]", 2, (b"[1]", b"[2]")),
        (b"[1,2,3]", 3, (b"[1]", b"[2,3]")),
        (b' [ 1 , "a,]" , {"b": [2, 3]} , null ] ', 4, (b'[1,"a,]"]', b'[{"b": [2, 3]},null]')),
        (b"[1.10,123456789012345678901234567890]", 2, (b"[1.10]", b"[123456789012345678901234567890]")),
        (b'["\\ud800","\xc3\xa9"]', 2, (b'["\\ud800"]', b'["\xc3\xa9"]')),
        (b"[1,2]", 3, None),
        (b"[]", 2, None),
        (b"[1,2", 2, None),
        (b"[1 2]", 2, None),
        (b"[1,]", 2, None),
        (b'{"a":1}', 2, None),
        (b"", 2, None),
        (b"\xff", 2, None),
        (b"[%b%b,1]" % (b"[" * 100_000, b"]" * 100_000), 2, None),
    ],
)
def test_a_payload_is_split_between_items_without_changing_their_text(
    payload: bytes, items: int, expected: tuple[bytes, bytes] | None
) -> None:
    assert split_payload(payload, items) == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(json_values, min_size=2, max_size=12), st.booleans(), st.sampled_from([None, 2]))
def test_both_halves_contain_all_items_in_order(items: list[object], is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(items, ensure_ascii=is_ascii, indent=indent)
    try:
        payload = text.encode()
    except UnicodeEncodeError:
        return  # an unpaired surrogate is not UTF-8; submissions reject it
    halves = split_payload(payload, len(items))
    assert halves is not None
    left, right = map(json.loads, halves)
    assert left + right == items
    assert len(left) == len(items) // 2
