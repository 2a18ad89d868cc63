"""Ray Data: `map_batches` over a range, two at a time; results in Ray's object store, or in Parquet files.

The input is Ray's own range, which is generated where it is used and never submitted.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import pyarrow.dataset
import ray
from batch_driver import Totals, serve
from batch_total import total

PARQUET = "parquet"


def call(batch: dict[str, Any]) -> dict[str, list[int]]:
    return {"total": [total(batch["id"].tolist())]}


def main(record: str) -> None:
    workers = int(os.environ["WORKERS"])
    folder = os.environ["BATCH_FOLDER"]
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    results = os.path.join(folder, "results")  # noqa: PTH118

    def run(items: int, batch_size: int) -> Totals:
        # A function becomes tasks, which is quicker here than two actors of a class.
        mapped = ray.data.range(items).map_batches(call, batch_size=batch_size)
        if record == PARQUET:
            shutil.rmtree(results, ignore_errors=True)
            mapped.write_parquet(results)
            return lambda: pyarrow.dataset.dataset(results).to_table()["total"].to_pylist()
        recorded = mapped.materialize()
        return lambda: [row["total"] for row in recorded.take_all()]

    serve(run)


if __name__ == "__main__":
    main(sys.argv[1])
