"""Compare requests to an ONNX model without code: `python -m benchmarks.inference_requests`.

cortex receives them by the Open Inference Protocol in binary and in JSON, and as plain JSON; MLServer and
`mlflow models serve` in the form that each of them has. All servers run at once and are loaded in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.tools import environments, machine, processes, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, free_ports
from benchmarks.tools.load import require_wrk
from benchmarks.tools.paths import PEERS, USER_CODE
from benchmarks.tools.side_by_side import Case, compare, table
from benchmarks.tools.workloads import BYTES, JSON, Workload

_API = """
- name: iris
  kind: RealtimeAPI
  handler: {type: onnx, models: {path: iris.onnx}}
  autoscaling: {max_replicas: 1}
"""
_ROW = [6.3, 3.3, 6.0, 2.5]
_INPUT = {"name": "X", "shape": [1, 4], "datatype": "FP32"}
_BINARY_HEAD = json.dumps(
    {"inputs": [_INPUT | {"parameters": {"binary_data_size": 16}}], "parameters": {"binary_data_output": True}}
).encode()
_BINARY = Workload(
    "V2 binary",
    _BINARY_HEAD + struct.pack("<4f", *_ROW),
    BYTES,
    b'"iris"',
    (("Inference-Header-Content-Length", str(len(_BINARY_HEAD))),),
)
_V2 = Workload("V2 JSON", json.dumps({"inputs": [_INPUT | {"data": _ROW}]}).encode(), JSON, b'"outputs"')
_PLAIN = Workload("plain JSON", json.dumps({"instances": [_ROW]}).encode(), JSON, b"2")
_MLFLOW = Workload("plain JSON", json.dumps({"inputs": [_ROW]}).encode(), JSON, b"2")

_Found = Callable[[], list[psutil.Process]]


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference_requests", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    options = parser.parse_args()
    require_wrk()
    for peer in ("mlserver", "mlflow"):
        environments.prepare(peer)
    processes.adopt_orphans()
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as path, contextlib.ExitStack() as stack:
        folder = Path(path)
        cortex = Cortex.in_folder(folder)
        (cortex.project / "iris_onnx.yaml").write_text(_API)
        stack.enter_context(cortex.up())
        cortex.deploy("iris_onnx")
        mlserver_port, mlserver = _mlserver(stack, folder)
        mlflow_port, mlflow = _mlflow(stack, folder)

        serving = cortex.serving()

        def of_cortex() -> list[psutil.Process]:
            return serving

        v2 = Endpoint(cortex.gateway_port, "/iris/v2/models/iris/infer")
        cases = [
            Case("iris", "cortex, V2 binary", v2, _BINARY, of_cortex),
            Case("iris", "cortex, V2 JSON", v2, _V2, of_cortex),
            Case("iris", "cortex, plain JSON", Endpoint(cortex.gateway_port, "/iris"), _PLAIN, of_cortex),
            Case("iris", "MLServer, V2 JSON", Endpoint(mlserver_port, "/v2/models/iris/infer"), _V2, mlserver),
            Case("iris", "MLflow, plain JSON", Endpoint(mlflow_port, "/invocations"), _MLFLOW, mlflow),
        ]
        measured = compare(cases, (1, 16, 64), options.rounds, options.seconds)
    text = f"# An ONNX model without code\n\n{table(measured)}"
    data = {"facts": facts, "measured": [dataclasses.asdict(row) for row in measured]}
    results.write("inference-requests", text, data)


def _mlserver(stack: contextlib.ExitStack, folder: Path) -> tuple[int, _Found]:
    """Start MLServer without worker processes, its fastest setting for one model; return its port and processes."""
    project = folder / "mlserver"
    shutil.copytree(PEERS / "mlserver", project)
    shutil.copy(USER_CODE / "iris.onnx", project)
    http, grpc, metrics = free_ports(3)
    settings = {
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": str(http),
        "MLSERVER_GRPC_PORT": str(grpc),
        "MLSERVER_METRICS_PORT": str(metrics),
        "MLSERVER_METRICS_DIR": str(project),
        "MLSERVER_PARALLEL_WORKERS": "0",
        "MLSERVER_DEBUG": "false",
    }
    command = [str(environments.python_of("mlserver").with_name("mlserver")), "start", "."]
    return http, _start(stack, command, _environ("mlserver") | settings, project)


def _mlflow(stack: contextlib.ExitStack, folder: Path) -> tuple[int, _Found]:
    """Start `mlflow models serve`; return its port and processes."""
    project = folder / "mlflow"
    project.mkdir()
    python = environments.python_of("mlflow")
    save = [str(python), str(PEERS / "mlflow" / "save_model.py"), str(USER_CODE / "iris.onnx"), "model"]
    subprocess.run(save, check=True, cwd=project, env=_environ("mlflow"), capture_output=True)
    port = free_ports(1)[0]
    command = [str(python.with_name("mlflow")), "models", "serve", "--model-uri", "model", "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return port, _start(stack, command, _environ("mlflow"), project)


def _environ(peer: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{environments.python_of(peer).parent}:{os.environ['PATH']}"}


def _start(stack: contextlib.ExitStack, command: list[str], environ: dict[str, str], folder: Path) -> _Found:
    process = stack.enter_context(processes.started(command, environ, folder, folder / "server.log"))
    return lambda: processes.tree([process.pid])


if __name__ == "__main__":
    main()
