"""Upper limit of every Python server: the user's function called in a loop.

`python bare.py noop 2 '{"x": 1}'` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time

from predictors import Iris, noop


def main() -> None:
    """Call the function for some seconds; print calls per second and percentiles."""
    name, seconds, body = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
    function = Iris().predict if name == "iris" else noop
    clock = time.perf_counter_ns
    taken: list[int] = []
    cpu = time.process_time()
    end = clock() + int(seconds * 1e9)
    before = clock()
    while before < end:
        function(body)
        after = clock()
        taken.append(after - before)
        before = after
    cpu = time.process_time() - cpu
    taken.sort()
    print(
        json.dumps(
            {
                "requests": len(taken),
                "seconds": seconds,
                "p50_us": taken[len(taken) // 2] / 1e3,
                "p99_us": taken[len(taken) * 99 // 100] / 1e3,
                "cpu_us": cpu / len(taken) * 1e6,
            }
        )
    )


if __name__ == "__main__":
    main()
