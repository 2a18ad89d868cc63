"""The fuzz's requests: repeatable, and of many kinds."""

from __future__ import annotations

import random

from benchmarks import malformed


def test_a_seed_always_gives_the_same_bytes() -> None:
    for number in range(300):
        seed = f"7/{number}"
        assert malformed.request(random.Random(seed), "/a") == malformed.request(random.Random(seed), "/a")


def test_seeds_give_different_requests() -> None:
    requests = {malformed.request(random.Random(f"7/{number}"), "/a") for number in range(300)}
    assert len(requests) > 280
