"""Upper limit: a process pool of the standard library, with results in a list and no durability.

The argument is the number of batches sent at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from batch_driver import Totals, batches, serve
from batch_total import total


def main(chunk: int) -> None:
    with multiprocessing.get_context("fork").Pool(int(os.environ["WORKERS"])) as pool:

        def run(items: int, batch_size: int) -> Totals:
            found = list(pool.imap_unordered(total, batches(items, batch_size), chunksize=chunk))
            return lambda: found

        serve(run)


if __name__ == "__main__":
    main(int(sys.argv[1]))
