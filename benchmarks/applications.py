"""Measure what the gateway and the replica add to an ASGI application: `python -m benchmarks.applications`.

The same application runs behind cortex and on uvicorn alone, with the same versions of all libraries: FastAPI, and one
without a framework. Both servers run at once and are loaded in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.tools import machine, processes, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, free_ports, wait_until_right
from benchmarks.tools.load import require_wrk
from benchmarks.tools.paths import PEERS, USER_CODE
from benchmarks.tools.side_by_side import Case, Measured, compare, table
from benchmarks.tools.streaming import Streaming, streaming
from benchmarks.tools.systems import START_LIMIT_S, environ_of
from benchmarks.tools.workloads import DOWNLOAD, NOOP, STREAM, UPLOAD, Workload

#: Module and name of each application.
_APPS = {"asgi": "asgi_noop", "fastapi": "server"}
_API = """
- name: {name}
  kind: RealtimeAPI
  handler: {{type: asgi, path: {module}.py, app: app, env: {{WORKLOAD: noop}}}}
  autoscaling: {{max_replicas: 1}}
"""


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.applications", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    options = parser.parse_args()
    require_wrk()
    processes.adopt_orphans()
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder, contextlib.ExitStack() as stack:
        cortex = Cortex.in_folder(Path(folder))
        shutil.copy(PEERS / "fastapi" / "server.py", cortex.project)
        shutil.copy(USER_CODE / "asgi_noop.py", cortex.project)
        stack.enter_context(cortex.up())
        alone = {}
        for name, module in _APPS.items():
            (cortex.project / f"{name}.yaml").write_text(_API.format(name=name, module=module))
            cortex.deploy(name)
            alone[name] = stack.enter_context(_uvicorn(module, cortex.project))
        measured, streams = _measure(cortex, alone, options)
    text = f"# Applications behind cortex, compared with uvicorn alone\n\n{table(measured)}\n"
    text += "| stream of FastAPI | first chunk | chunks/s |\n|---|---|---|\n"
    text += "".join(
        f"| {name} | {row.first_byte_us:,.0f} µs | {row.chunks_per_s:,.0f} |\n" for name, row in streams.items()
    )
    data = {
        "facts": facts,
        "measured": [dataclasses.asdict(row) for row in measured],
        "streams": {name: dataclasses.asdict(row) for name, row in streams.items()},
    }
    results.write("applications", text, data)


def _measure(
    cortex: Cortex, alone: dict[str, tuple[int, psutil.Process]], options: argparse.Namespace
) -> tuple[list[Measured], dict[str, Streaming]]:
    serving = cortex.serving()

    def pair(name: str, workload: Workload) -> list[Case]:
        port, process = alone[name]
        return [
            Case(
                f"{name} {workload.name}", "uvicorn", Endpoint(port, f"/{workload.name}"), workload, lambda: [process]
            ),
            Case(
                f"{name} {workload.name}",
                "cortex",
                Endpoint(cortex.gateway_port, f"/{name}/{workload.name}"),
                workload,
                lambda: serving,
            ),
        ]

    small = [*pair("asgi", NOOP), *pair("fastapi", NOOP)]
    large = [*pair("fastapi", UPLOAD), *pair("fastapi", DOWNLOAD)]
    measured = compare(small, (1, 16, 64), options.rounds, options.seconds)
    measured += compare(large, (16,), options.rounds, options.seconds)
    rounds: dict[str, list[Streaming]] = {case.system: [] for case in pair("fastapi", STREAM)}
    for _ in range(options.rounds):
        for case in pair("fastapi", STREAM):
            wait_until_right(case.endpoint, case.workload, START_LIMIT_S)
            rounds[case.system].append(streaming(case.endpoint, case.workload, options.seconds / 2))
    return measured, {
        system: Streaming(
            statistics.median(row.first_byte_us for row in rows), statistics.median(row.chunks_per_s for row in rows)
        )
        for system, rows in rounds.items()
    }


@contextlib.contextmanager
def _uvicorn(module: str, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run an application on uvicorn alone; yield its port and its process."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "uvicorn", f"{module}:app", "--port", str(port), "--no-access-log"]
    command += ["--loop", "uvloop", "--http", "httptools", "--log-level", "warning"]
    with processes.started(command, environ_of(WORKLOAD="noop"), folder, folder.parent / f"{module}.log") as process:
        yield port, psutil.Process(process.pid)


if __name__ == "__main__":
    main()
