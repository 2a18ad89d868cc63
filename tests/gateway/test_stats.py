"""What several gateways do, as one."""

from __future__ import annotations

import json

from cortex.gateway.stats import BackendStats, summed

BUSY = BackendStats(3, 2, 7, {"a-0": 1, "b-0": 2}, {2: 30, 5: 1}, 10.0)
IDLE = BackendStats(1, 0, 1, {"b-0": 1}, {2: 8, 4: 2}, 52.0)


def test_numbers_add_up_and_times_weigh_by_answers() -> None:
    both = summed([BUSY, IDLE])
    assert both == BackendStats(4, 2, 8, {"a-0": 1, "b-0": 3}, {2: 38, 4: 2, 5: 1}, both.average_ms)
    assert both.average_ms == (31 * 10 + 10 * 52) / 41


def test_none_and_one_are_what_they_are() -> None:
    assert summed([]) == BackendStats(0, 0)
    assert summed([BUSY]) == BUSY


def test_they_come_out_of_json_as_they_went_in() -> None:
    for stats in (BUSY, BackendStats(0, 0)):
        assert BackendStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats
