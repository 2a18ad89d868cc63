"""Closed-loop load with `wrk`: each connection sends its next request when it has received a response."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tools.endpoint import Endpoint
from benchmarks.tools.paths import BENCHMARKS
from benchmarks.tools.workloads import Workload


@dataclass(frozen=True)
class Load:
    """Results of a load generator."""

    requests: int
    seconds: float
    p50_us: float
    p99_us: float
    errors: int
    bytes: int = 0

    @property
    def per_s(self) -> float:
        """Responses per second."""
        return self.requests / self.seconds


def require_wrk() -> None:
    """Raise a SystemExit with installation help if `wrk` is missing."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not on PATH: `apt-get install wrk` (Debian, Ubuntu) or `brew install wrk`")


def closed_loop(
    endpoint: Endpoint,
    workload: Workload,
    concurrency: int,
    seconds: float,
    api_key: str | None = None,
    prefix: Sequence[str] = (),
) -> Load:
    """Keep `concurrency` requests open for some (whole) seconds; `prefix` runs the generator on another machine."""
    with tempfile.TemporaryDirectory(prefix="wrk-") as folder:
        body = Path(folder, "body")
        body.write_bytes(workload.body)
        duration = max(1, round(seconds))
        command = [*prefix, "wrk", "-t1", f"-c{concurrency}", f"-d{duration}s", "--timeout", "30s"]
        command += ["-s", str(BENCHMARKS / "tools" / "wrk.lua"), endpoint.url]
        environ = {**os.environ, "WRK_BODY": str(body), "WRK_CONTENT_TYPE": workload.content_type}
        headers = (*workload.headers, ("X-API-Key", api_key)) if api_key else workload.headers
        environ["WRK_HEADERS"] = "".join(f"{name}={value}\n" for name, value in headers)
        done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=seconds + 60)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return Load(**json.loads(line.removeprefix("RESULT ")))
