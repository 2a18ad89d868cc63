"""Measure the default number of threads of computing processes against chosen ones: `python -m benchmarks.threads`.

An API with as many processes as there are processors multiplies matrices and is asked by twice as many clients. Each
library runs with the default, with each `OMP_NUM_THREADS` from 1 to the processors in `env`, and with `pin_processes`.
`onnx` is a model of `type: onnx`. `onnxruntime` is a session that the user's code creates with as many threads as
`OMP_NUM_THREADS`; that of `onnxruntime-unset` has its own default, which does not depend on the variable.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tools import machine, processes, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.open_calls import send_all

_HANDLERS = {
    "numpy": """
import numpy


class Handler:
    def __init__(self, config):
        self.weights = numpy.random.default_rng(0).random((700, 700), dtype="float32")

    def handle_post(self, payload):
        rows = self.weights
        for _ in range(4):
            rows = rows @ self.weights
            rows /= rows.max()
        return float(rows[0, 0])
""",
    "torch": """
import torch


class Handler:
    def __init__(self, config):
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(4)])
        self.rows = torch.rand(700, 700)

    def handle_post(self, payload):
        with torch.inference_mode():
            return float(self.layers(self.rows)[0, 0])
""",
}
_SESSION = """
import numpy
import onnxruntime
import os


class Handler:
    def __init__(self, config):
        options = onnxruntime.SessionOptions()
        {options}
        self.session = onnxruntime.InferenceSession("model.onnx", options)
        self.rows = numpy.random.default_rng(0).random((700, 700), dtype="float32")

    def handle_post(self, payload):
        return float(self.session.run(None, {{"x": self.rows}})[0][0, 0])
"""
_HANDLERS["onnxruntime-unset"] = _SESSION.format(options="")
_HANDLERS["onnxruntime"] = _SESSION.format(
    options="""options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")"""
)
_HANDLERS["onnx"] = """
import numpy


class Handler:
    def __init__(self, onnx_client, config):
        self.client = onnx_client
        self.rows = numpy.random.default_rng(0).random((700, 700), dtype="float32")

    def handle_post(self, payload):
        return float(self.client.predict(self.rows)[0][0, 0])
"""
_PACKAGES = {"numpy": "numpy", "torch": "torch"}
_API = """
- name: threads
  kind: RealtimeAPI
  handler:
    type: {type}
    path: with_{library}.py
    processes_per_replica: {processes}
    {settings}
  autoscaling: {{max_replicas: 1}}
"""


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__)
    parser.add_argument(
        "--libraries",
        default="numpy",
        help="of numpy, torch, onnx, onnxruntime and onnxruntime-unset, separated by commas",
    )
    parser.add_argument("--calls", type=int, default=400, help="calls of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each setting, of which the best counts")
    options = parser.parse_args()
    processes.adopt_orphans()
    cores = len(os.sched_getaffinity(0))
    settings = {"default": "env: {}"}
    settings |= {str(n): f'env: {{OMP_NUM_THREADS: "{n}"}}' for n in range(1, cores + 1)}
    settings["pinned"] = "pin_processes: true"
    rates: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        cortex = Cortex.in_folder(Path(folder))
        with cortex.up():
            for library in options.libraries.split(","):
                (cortex.project / f"with_{library}.py").write_text(_HANDLERS[library])
                package = _PACKAGES.get(library, "onnxruntime\nnumpy")
                (cortex.project / "requirements.txt").write_text(f"{package}\n")
                if library not in _PACKAGES:
                    _write_model(cortex.project / "model.onnx")
                rates[library] = dict.fromkeys(settings, 0.0)
                for _ in range(options.rounds):
                    for name, setting in settings.items():
                        kind, models = ("onnx", "models: {path: model.onnx}") if library == "onnx" else ("python", "")
                        extra = "\n    ".join(filter(None, [setting, models]))
                        text = _API.format(library=library, type=kind, processes=cores, settings=extra)
                        (cortex.project / "threads.yaml").write_text(text)
                        cortex.deploy("threads")
                        rate = asyncio.run(_rate(cortex.gateway_port, options.calls, 2 * cores))
                        rates[library][name] = max(rates[library][name], rate)
                        print(library, name, f"{rate:.1f}/s", flush=True)
    text = f"# Threads of {cores} computing processes on {cores} processors, calls/s\n\n"
    text += f"| library | {' | '.join(settings)} | default ÷ best |\n|---{'|---' * (len(settings) + 1)}|\n"
    for library, row in rates.items():
        best = max(rate for name, rate in row.items() if name.isdigit())
        cells = " | ".join(f"{rate:.1f}" for rate in row.values())
        text += f"| {library} | {cells} | {row['default'] / best:.2f} |\n"
    data: dict[str, Any] = {"facts": machine.facts(), "rates": rates}
    results.write("threads", text, data)


def _write_model(path: Path) -> None:
    """Write a network of four layers."""
    import numpy
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy.random.default_rng(0).random((700, 700), dtype="float32") / 700
    names = ["x", "a", "b", "c", "y"]
    layers = [helper.make_node("MatMul", [before, "weights"], [after]) for before, after in pairwise(names)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 700]) for name in ("x", "y")]
    graph = helper.make_graph(layers, "layers", ends[:1], ends[1:], [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(model.SerializeToString())


async def _rate(port: int, calls: int, clients: int) -> float:
    """Return the calls per second of clients that each send one call after the other."""
    loop = asyncio.get_running_loop()
    await send_all(port, "/threads", b"{}", [0.0] * clients)
    started = loop.time()

    async def client() -> None:
        for _ in range(calls // clients):
            (answer,) = await send_all(port, "/threads", b"{}", [0.0])
            if answer.status != 200:
                raise SystemExit(f"a call got {answer.status}")

    await asyncio.gather(*(client() for _ in range(clients)))
    return calls / (loop.time() - started)


if __name__ == "__main__":
    main()
