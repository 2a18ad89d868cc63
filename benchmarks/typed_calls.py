"""Measure what an annotated payload and result add to a no-op: `python -m benchmarks.typed_calls`."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.tools import machine, processes, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint
from benchmarks.tools.load import require_wrk
from benchmarks.tools.side_by_side import Case, compare, table
from benchmarks.tools.workloads import NOOP

_UNTYPED = """
class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        return {"y": payload["x"]}
"""
_TYPED = """
{imports}

{decorator}
class Input{base}:
    x: int

{decorator}
class Output{base}:
    y: int

class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload: Input) -> Output:
        return Output(y=payload.x)
"""
_HANDLERS = {
    "untyped": _UNTYPED,
    "pydantic": _TYPED.format(imports="from pydantic import BaseModel", decorator="", base="(BaseModel)"),
    "dataclass": _TYPED.format(imports="from dataclasses import dataclass", decorator="@dataclass", base=""),
}
_API = """
- name: {name}
  kind: RealtimeAPI
  handler: {{type: python, path: typed_{name}.py}}
  autoscaling: {{max_replicas: 1}}
"""


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.typed_calls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    options = parser.parse_args()
    require_wrk()
    processes.adopt_orphans()
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        cortex = Cortex.in_folder(Path(folder))
        with cortex.up():
            for name, source in _HANDLERS.items():
                (cortex.project / f"typed_{name}.py").write_text(source)
                (cortex.project / f"typed_{name}.yaml").write_text(_API.format(name=name))
                cortex.deploy(f"typed_{name}")
            endpoints = {name: Endpoint(cortex.gateway_port, f"/{name}") for name in _HANDLERS}
            serving = cortex.serving()
            cases = [Case("noop", name, endpoint, NOOP, lambda: serving) for name, endpoint in endpoints.items()]
            measured = compare(cases, (1, 64), options.rounds, options.seconds)
    text = f"# Annotated payloads and results, compared with none\n\n{table(measured)}"
    results.write("typed-calls", text, {"facts": facts, "measured": [dataclasses.asdict(row) for row in measured]})


if __name__ == "__main__":
    main()
