"""Measure replicas on a Ray cluster: their throughput against one machine and Ray Serve, and large projects.

The cluster is that of the tests: a head and three nodes in network namespaces of this machine (requires root and
`iproute2`). All systems of a round run at the same time and are measured one after the other, so compare ratios only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.tools import environments
from benchmarks.tools.endpoint import Endpoint, wait_until_right
from benchmarks.tools.load import closed_loop, require_wrk
from benchmarks.tools.paths import PEERS, USER_CODE
from benchmarks.tools.systems import START_LIMIT_S, named
from benchmarks.tools.workloads import IRIS, NOOP, Workload

_TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "cluster")]

from harness.cluster.cluster_installation import OnRay, cluster_installation, installed  # noqa: E402
from harness.cluster.ray_cluster import RayNode  # noqa: E402

LOCAL, PEER_NAMES = "cortex", ("ray-serve", "ray-serve-haproxy")
OVER_NETWORK, BESIDE = "cortex on Ray, over the network", "cortex on Ray, beside its operator"
#: Of the median ratio, which is cortex on Ray to the system.
GOALS = {LOCAL: 0.9, "ray-serve": 10.0}
NODES = 3
#: The node group of the node with an operator of its own.
GROUP = "beside"
#: The systems beside ours on Ray, and what each is asked.
COMPARED = ((NOOP, (LOCAL, *PEER_NAMES)), (IRIS, (LOCAL,)))
#: Where they serve, by the name of the workload and their own.
Others = Mapping[str, Mapping[str, Endpoint]]
_CONFIG = """
- name: {name}
  kind: RealtimeAPI
  handler: {{type: python, path: {path}}}
  compute: {{cpu: {cpu}{where}}}
  autoscaling: {{min_replicas: {replicas}, max_replicas: {replicas}}}
"""
_HANDLER = """
class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        return {}
"""


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3, help="duration of each measurement in seconds")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--project-mb", type=int, default=200)
    parser.add_argument("--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    arguments = parser.parse_args()
    require_wrk()
    if "throughput" in arguments.parts:
        environments.prepare("ray_serve")
    began = time.monotonic()
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with contextlib.ExitStack() as stack:  # what is started outside of the cluster outlives it
        others = stack.enter_context(_others()) if "throughput" in arguments.parts else {}
        on_ray = stack.enter_context(cluster_installation(NODES, groups={0: [GROUP]}))
        print(f"all is up after {time.monotonic() - began:.0f} s", flush=True)
        for name, part in _PARTS.items():
            if name in arguments.parts:
                part(on_ray, others, arguments)
    print(f"\n{time.monotonic() - began:.0f} s; load of the machine after: {os.getloadavg()[0]:.1f}")


@contextlib.contextmanager
def _others() -> Iterator[Others]:
    """Serve the no-op with each of the other systems, and a small model with ours."""
    with contextlib.ExitStack() as stack:
        yield {
            workload.name: {each.name: stack.enter_context(each.serve(workload)) for each in named(",".join(names))}
            for workload, names in COMPARED
        }


def _throughput(on_ray: OnRay, others: Others, arguments: argparse.Namespace) -> None:
    """Measure all in turn. wrk runs on the gateway machine; only the connection to the replica may cross a network."""
    with installed(on_ray.cluster, place=on_ray.cluster.nodes[0]) as beside:
        ours = {OVER_NETWORK: on_ray, BESIDE: beside}
        for workload, _ in COMPARED:
            for name, made in ours.items():
                _deploy(made, workload, [GROUP] if name == BESIDE else [])
            _compare(ours, workload, others[workload.name], arguments)
            for made in ours.values():
                made.cortex.cortex("delete", workload.name, "-f")


def _deploy(made: OnRay, workload: Workload, groups: Sequence[str]) -> None:
    code = (PEERS / "cortex" / f"{workload.name}.py").read_bytes()
    with _project({"api.py": code}, workload.name, "api.py", 1, 1, groups) as project:
        for file in ("predictors.py", "iris.onnx"):
            (project / file).write_bytes((USER_CODE / file).read_bytes())
        made.cortex.cortex("deploy", project)
    wait_until_right(_endpoint(made, workload), workload, START_LIMIT_S)


def _endpoint(made: OnRay, workload: Workload) -> Endpoint:
    return Endpoint(made.cortex.gateway_port, f"/{workload.name}", made.cortex.host)


def _compare(
    ours: Mapping[str, OnRay], workload: Workload, others: Mapping[str, Endpoint], arguments: argparse.Namespace
) -> None:
    endpoints = {**{name: _endpoint(made, workload) for name, made in ours.items()}, **others}
    rates: dict[str, list[float]] = {name: [] for name in endpoints}
    for number in range(arguments.rounds + 1):
        order = list(endpoints) if number % 2 else list(reversed(endpoints))
        for name in order:
            prefix = ours[name].cortex.prefix if name in ours else ()
            seconds = arguments.seconds if number else 1  # the first round warms up
            load = closed_loop(endpoints[name], workload, arguments.concurrency, seconds, prefix=prefix)
            if load.errors:
                raise SystemExit(f"{name}: {load.errors} requests failed")
            if number:
                rates[name].append(load.per_s)
    print(f"\n| {workload.name}, {arguments.concurrency} connections | requests/s | {' | '.join(ours)} | goal |")
    print("|---|---|---|---|---|")
    for name, found in rates.items():
        ratios = [_median_ratio(rates[mine], found) for mine in ours]
        goal = f"≥ {GOALS[name]:g}" if name in GOALS else ""
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | {statistics.median(found):.0f} | {shown} | {goal} |", flush=True)


def _median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, others, strict=True))


def _archives(on_ray: OnRay, others: Others, arguments: argparse.Namespace) -> None:
    """Deploy a large project to all nodes, with two replicas on each."""
    size = arguments.project_mb * 1_000_000
    files = {"handler.py": _HANDLER.encode(), "weights.bin": os.urandom(size)}
    nodes = on_ray.cluster.nodes
    with _project(files, "large", "handler.py", NODES * 2, 1.5) as project:
        before = [_received(node) for node in nodes]
        began = time.monotonic()
        on_ray.cortex.cortex("deploy", "--yes", project, timeout_s=300)
        on_ray.live("large", NODES * 2)
        live_s = time.monotonic() - began
    came = [_received(node) - bytes_before for node, bytes_before in zip(nodes, before, strict=True)]
    print(f"\n| a project of {arguments.project_mb} MB, two replicas on each of {NODES} nodes | |\n|---|---|")
    print(f"| from `cortex deploy` until all are ready | {live_s:.1f} s |")
    print(f"| sent to each node, times the project | {', '.join(f'{each / size:.2f}' for each in came)} |", flush=True)
    on_ray.cortex.cortex("delete", "large", "-f")


def _no_index(on_ray: OnRay, others: Others, arguments: argparse.Namespace) -> None:
    """Deploy a project with a requirement to nodes without access to a package index."""
    files = {"handler.py": _HANDLER.encode(), "requirements.txt": b"numpy>=1.26\n"}
    with _project(files, "indexless", "handler.py", 1, 1) as project:
        began = time.monotonic()
        done = on_ray.cortex.cortex("deploy", project, check=False, timeout_s=300)
        took_s = time.monotonic() - began
    said = [line for line in (done.stdout + done.stderr).splitlines() if line]
    print(
        f"\nNo node reaches a package index: `cortex deploy` ends with {done.returncode} after {took_s:.0f} s and says"
    )
    print("\n".join(f"    {line}" for line in said), flush=True)
    on_ray.cortex.cortex("delete", "indexless", "-f", check=False)


_PARTS = {"throughput": _throughput, "archives": _archives, "index": _no_index}


@contextlib.contextmanager
def _project(
    files: Mapping[str, bytes], name: str, path: str, replicas: int, cpu: float, groups: Sequence[str] = ()
) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        for file, data in files.items():
            Path(folder, file).write_bytes(data)
        where = f", node_groups: {json.dumps(list(groups))}" if groups else ""
        config = _CONFIG.format(name=name, path=path, replicas=replicas, cpu=cpu, where=where)
        Path(folder, "cortex.yaml").write_text(config)
        yield Path(folder)


def _received(node: RayNode) -> int:
    """Return the bytes that a machine has received."""
    text = node.run(["cat", "/proc/net/dev"])
    [line] = [line for line in text.splitlines() if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[0])


if __name__ == "__main__":
    main()
