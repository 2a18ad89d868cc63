"""Memory of four processes that share one model: `python -m benchmarks.shared_weights`.

For each library, a model of 500 MB is served by cortex with one process, by four without and with `preload`, by
gunicorn with `--preload` and by Mosec. After 10,000 requests, which touch all weights, the memory (PSS) of the
server's processes is compared with that of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sysconfig
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from shutil import copy

from benchmarks.tools import environments, machine, processes, results
from benchmarks.tools.cortex_cli import Cortex, groups
from benchmarks.tools.endpoint import Endpoint, free_ports, wait_until_right
from benchmarks.tools.paths import PEERS, USER_CODE
from benchmarks.tools.systems import START_LIMIT_S, environ_of, running
from benchmarks.tools.workloads import JSON, Workload

_PEER = "shared_weights"
_LIBRARIES = "numpy,torch,onnxruntime,onnxruntime-mapped"
_SYSTEMS = ("cortex, 1 process", "cortex, preload", "cortex", "gunicorn --preload", "mosec")
_CLIENTS = 8
_HANDLER = """
    import os
    from pathlib import Path

    import weights

    LIBRARY, MODELS = os.environ["LIBRARY"], Path(os.environ["MODELS"])

    class Handler:
        def __init__(self, config):
            if LIBRARY != "onnxruntime-mapped":
                self.predict = weights.load(LIBRARY, MODELS)

        def after_fork(self):
            if LIBRARY == "onnxruntime-mapped":
                self.predict = weights.load(LIBRARY, MODELS, threads=2)

        def handle_post(self, payload):
            return self.predict(payload["i"])
"""


@dataclass(frozen=True)
class Measured:
    """Memory of one server after its requests."""

    library: str
    system: str
    start_s: float
    memory_mb: float
    mistakes: int


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_weights", description=__doc__)
    parser.add_argument("--size", type=int, default=500, help="megabytes of the model")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--libraries", default=_LIBRARIES)
    parser.add_argument("--systems", default=";".join(_SYSTEMS), help="separated by semicolons")
    arguments = parser.parse_args()
    python = environments.prepare(_PEER)
    processes.adopt_orphans()
    facts, found = machine.facts(), []
    for library in arguments.libraries.split(","):
        with tempfile.TemporaryDirectory(prefix="cortex-weights-") as folder:
            models = Path(folder)
            write = f"import weights, pathlib; weights.write({library!r}, pathlib.Path({folder!r}), {arguments.size})"
            with processes.started([str(python), "-c", write], environ_of(), models, models / "log") as writing:
                if writing.wait():
                    raise SystemExit((models / "log").read_text())
            for system in arguments.systems.split(";"):
                if library == "onnxruntime-mapped" and not system.startswith("cortex"):
                    continue
                found.append(_one(library, system, models, arguments))
                print(found[-1], flush=True)
    text = f"# Shared weights, {arguments.size} MB, {arguments.requests:,} requests\n\n{_table(found)}\n"
    results.write("shared-weights", text, {"facts": facts, "samples": [asdict(each) for each in found]})


def _one(library: str, system: str, models: Path, arguments: argparse.Namespace) -> Measured:
    before = time.monotonic()
    workers = 1 if "1 process" in system else arguments.processes
    with tempfile.TemporaryDirectory(prefix="cortex-bench-", ignore_cleanup_errors=True) as folder:
        serve = _cortex if system.startswith("cortex") else _peer
        with serve(library, system, workers, models, Path(folder)) as (endpoint, members):
            start_s = time.monotonic() - before
            mistakes = _load(endpoint, arguments.requests)
            memory_mb = processes.pss_mb(members())
    return Measured(library, system, start_s, memory_mb, mistakes)


def _load(endpoint: Endpoint, requests: int) -> int:
    """Send the requests on several connections; return how many were not answered with 200."""
    numbers: SimpleQueue[int] = SimpleQueue()
    for number in range(requests):
        numbers.put(number)
    mistakes = count()

    def client() -> None:
        connection = HTTPConnection(endpoint.host, endpoint.port, timeout=60)
        with contextlib.suppress(Empty):
            while True:
                body = json.dumps({"i": numbers.get_nowait()})
                connection.request("POST", endpoint.path, body, {"content-type": JSON})
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    next(mistakes)
        connection.close()

    clients = [threading.Thread(target=client) for _ in range(_CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return next(mistakes)


_FIRST = Workload("weights", b'{"i": 0}', JSON, b"8519")  # 1024 / 977 * (0 + 1 + … + 127)


@contextlib.contextmanager
def _cortex(library: str, system: str, workers: int, models: Path, folder: Path) -> Iterator:
    cortex = Cortex.in_folder(folder)
    project = folder / "weights"
    project.mkdir()
    copy(USER_CODE / "weights.py", project)
    (project / "handler.py").write_text(textwrap.dedent(_HANDLER))
    base = {"base": str(environments.python_of(_PEER).parent.parent)}
    handler = {
        "type": "python",
        "path": "handler.py",
        "processes_per_replica": workers,
        "preload": "preload" in system,
        # The libraries of the peers, so that all servers have the same, and no environment has to be built.
        "env": {"LIBRARY": library, "MODELS": str(models), "PYTHONPATH": sysconfig.get_path("purelib", vars=base)},
    }
    api = {"name": "weights", "kind": "RealtimeAPI", "handler": handler, "autoscaling": {"max_replicas": 1}}
    (project / "cortex.yaml").write_text(json.dumps([api]))  # YAML contains JSON
    with cortex.up():
        cortex.run("deploy", str(project / "cortex.yaml"), "-o", "json")
        endpoint = Endpoint(cortex.gateway_port, "/weights")
        wait_until_right(endpoint, _FIRST, START_LIMIT_S)
        yield endpoint, lambda: groups(cortex.status())["replicas"]


@contextlib.contextmanager
def _peer(library: str, system: str, workers: int, models: Path, folder: Path) -> Iterator:
    python, peer = environments.python_of(_PEER), PEERS / _PEER
    port = free_ports(1)[0]
    endpoint = Endpoint(port, "/predict")
    if system == "mosec":
        command = [str(python), str(peer / "mosec_server.py"), "--port", str(port), "--timeout", "60000"]
        command += ["--path", str(folder / "ipc"), "--log-level", "warning", "--address", endpoint.host]
    else:
        command = [str(python), "-m", "gunicorn", "--preload", "--workers", str(workers), "--bind"]
        command += [f"{endpoint.host}:{port}", "--chdir", str(peer), "wsgi_server:app"]
    environ = environ_of(LIBRARY=library, MODELS=str(models), WORKERS=str(workers))
    with running(command, environ, folder, endpoint, _FIRST):
        yield endpoint, processes.descendants


def _table(found: list[Measured]) -> str:
    rows = ["| library | server | start | memory | of one process |", "| --- | --- | --- | --- | --- |"]
    for each in found:
        one = next((m for m in found if m.library == each.library and "1 process" in m.system), None)
        ratio = f"{each.memory_mb / one.memory_mb:.2f}" if one else "-"
        wrong = f" ({each.mistakes} errors)" if each.mistakes else ""
        rows.append(
            f"| {each.library} | {each.system}{wrong} | {each.start_s:.1f} s | {each.memory_mb:,.0f} MB | {ratio} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
