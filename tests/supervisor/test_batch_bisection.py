"""Requests of batches that killed their workers are retried in smaller and smaller groups."""

from __future__ import annotations

import pytest

from cortex.supervisor.batch_bisection import BatchBisection
from cortex.worker.channel import Channel


def groups_of(found: BatchBisection) -> list[set[str]]:
    groups: dict[int, set[str]] = {}
    for request_id, group in found.groups.items():
        groups.setdefault(group, set()).add(request_id)
    return sorted(groups.values(), key=lambda group: sorted(group))


def test_a_single_batch_is_split_in_halves() -> None:
    found = BatchBisection()
    found.blame([["a", "b", "c", "d", "e"]])

    assert groups_of(found) == [{"a", "b", "c"}, {"d", "e"}]
    assert found.has_new


def test_each_of_several_batches_runs_apart_before_one_is_split() -> None:
    found = BatchBisection()
    found.blame([["a", "b"], ["c"], ["d", "e"]])

    assert groups_of(found) == [{"a", "b"}, {"c"}, {"d", "e"}]


@pytest.mark.parametrize("guilty", range(32))
def test_the_fatal_request_is_isolated_after_a_logarithmic_number_of_deaths(guilty: int) -> None:
    found, group, deaths = BatchBisection(), [str(number) for number in range(32)], 0
    while len(group) > 1:
        found.blame([group])
        deaths += 1
        group = sorted(next(some for some in groups_of(found) if str(guilty) in some), key=int)

    assert group == [str(guilty)]
    assert deaths == 5


def test_groups_of_different_deaths_are_not_mixed() -> None:
    found = BatchBisection()
    found.blame([["a", "b"]])
    found.blame([["c", "d"]])

    assert groups_of(found) == [{"a"}, {"b"}, {"c"}, {"d"}]


def test_answered_requests_are_removed() -> None:
    found = BatchBisection()
    found.blame([["a", "b", "c"]])
    found.keep({"b", "x"})

    assert groups_of(found) == [{"b"}]


def test_groups_are_split_into_messages_of_limited_size() -> None:
    found = BatchBisection()
    found.blame([[f"{number:048}" for number in range(9000)]])
    ours, theirs = Channel.pair()
    told: dict[str, int] = {}
    for groups in found.messages():
        assert ours.send("suspects", groups=groups)
        received = theirs.receive()
        assert received is not None
        told |= received[0]["groups"]
    ours.close()
    theirs.close()

    assert told == found.groups
