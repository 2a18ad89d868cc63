"""How the benchmark talks to the program that drives one system: a line in, a line out.

`run ITEMS BATCH_SIZE` is answered once every batch is recorded, with the seconds that took; `totals` with how many
batches were recorded and the sum of what they returned.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator

#: Returns what the batches returned; called once the time was taken.
Totals = Callable[[], Iterable[int]]


def serve(run: Callable[[int, int], Totals]) -> None:
    """Say that the system is ready, then do as told until the input ends."""
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
