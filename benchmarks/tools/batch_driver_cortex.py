"""Driver of cortex in the comparison of batch systems; see `user_code/batch_driver.py`.

It sends the items as JSON lines, and polls `GET <endpoint>?jobID=` until the job has ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from batch_driver import Totals, serve

from benchmarks.tools.batch_client import JobError, Jobs, lines


def main() -> None:
    """Answer the benchmark's commands."""
    ports = int(os.environ["GATEWAY_PORT"]), int(os.environ["OPERATOR_PORT"])
    jobs = Jobs(*ports, Path(os.environ["CORTEX_HOME"]), "batch")
    workers = int(os.environ["WORKERS"])

    def run(items: int, batch_size: int) -> Totals:
        job = jobs.submit_lines(lines(items), workers=workers, batch_size=batch_size)
        status = jobs.wait(job, every_s=0.05)
        if status["status"] != "succeeded":
            raise JobError(str(status))
        return lambda: (each["result"] for each in jobs.results(job))

    serve(run)


if __name__ == "__main__":
    main()
