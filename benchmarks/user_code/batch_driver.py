"""Line protocol between the benchmark and the program that drives one system.

`run ITEMS BATCH_SIZE` is answered with the seconds until every batch was recorded; `totals` with the number of recorded
batches and the sum of their results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator

#: Returns what the batches returned; called once the time was taken.
Totals = Callable[[], Iterable[int]]


def serve(run: Callable[[int, int], Totals]) -> None:
    """Report that the system is ready, then execute commands until the input ends."""
    _say("ready")
    totals: Totals | None = None
    for line in sys.stdin:
        order, *numbers = line.split()
        if order == "run":
            items, batch_size = map(int, numbers)
            start = time.perf_counter()
            totals = run(items, batch_size)
            _say({"seconds": time.perf_counter() - start})
        elif totals is not None:
            found = list(totals())
            _say({"batches": len(found), "total": sum(found)})


def batches(items: int, batch_size: int) -> Iterator[list[int]]:
    """Yield the input: the integers from 0."""
    for start in range(0, items, batch_size):
        yield list(range(start, min(start + batch_size, items)))


def _say(answer: object) -> None:
    # Marked, because libraries print too.
    print("ANSWER " + json.dumps(answer), flush=True)
