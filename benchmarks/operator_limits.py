"""Measure the limits of one operator in a cluster: nodes, replicas, reconciler passes, routes in HAProxy.

Run `python -m benchmarks.operator_limits [--replicas 100,1000]`. The nodes are scripted: they speak the protocol of
node agents and host nothing. Everything else is the operator's own code in one process, and a real HAProxy. Times are
CPU seconds of that process unless stated otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.tools.endpoint import free_ports
from cortex.cluster.credentials import ClusterCredentials, node_identity
from cortex.cluster.engine import ClusterEngine
from cortex.cluster.known_nodes import KnownNodes
from cortex.cluster.placement import NodeAddress, Placement, Resources
from cortex.cluster.transport import PeerConnection, listen
from cortex.config.schema import Api
from cortex.engine.local import first_status
from cortex.gateway.config import GatewaySettings
from cortex.gateway.haproxy import HaproxyGateway
from cortex.home import Home
from cortex.lifecycle import ProcessState
from cortex.operator.replicas.plan import Preparation, Replica, Stage, plan
from cortex.operator.replicas.routing import routes_of
from cortex.state.database import open_state
from cortex.state.queries.apis import ApiRecord, Revision
from cortex.state.queries.key_values import KeyValueStore
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaSpec, ReplicaStatus

CREDENTIALS = ClusterCredentials("a secret", "127.0.0.1", 0)
PER_NODE = 20
PER_API = 10
_FOLLOWED_S = 10.0


class ScriptedNode:
    """Node that reports ready replicas and sends heartbeats."""

    def __init__(self, host: str, home: Path, replicas: Mapping[str, ReplicaSpec]) -> None:
        self.host, self.port = host, 0
        self._home = home
        self._replicas = replicas
        self._wires: list[PeerConnection] = []

    async def start(self) -> None:
        server = await listen(self._serve, self.host, 0, node_identity(CREDENTIALS.for_nodes, self.host))
        self.port = int(server.sockets[0].getsockname()[1])

    def change(self) -> None:
        """Report one replica again."""
        spec = next(iter(self._replicas.values()))
        for wire in self._wires:
            wire.send(self._event(spec))

    async def _serve(self, wire: PeerConnection) -> None:
        if (await wire.receive() or {}).get("purpose") != "control":
            wire.close()
            return
        wire.send({"event": "node", "home": str(self._home)})
        for spec in self._replicas.values():
            wire.send(self._event(spec))
        wire.send({"event": "complete"})
        self._wires.append(wire)
        with contextlib.suppress(asyncio.CancelledError):
            while not wire.writer.is_closing():
                wire.send({"event": "beat"})
                await asyncio.sleep(1)

    def _event(self, spec: ReplicaSpec) -> dict[str, object]:
        status = ready(spec, self.host)
        told = {"spec": spec.to_json(), "status": status.to_json(), "is_reserved": True}
        return {"event": "replica", "id": spec.id, **told}


class NoPlacer:
    """Placer that is never called: everything is placed."""

    is_available, reason = True, ""

    def __init__(self, found: dict[str, Placement]) -> None:
        self._found = found

    async def startup(self, on_change: object) -> None: ...

    async def shutdown(self) -> None: ...

    async def place(self, name: str, resources: Resources, node_id: str = "") -> None: ...

    async def remove(self, name: str) -> None: ...

    def placements(self) -> dict[str, Placement]:
        return self._found

    def resources(self) -> None:
        return None


def ready(spec: ReplicaSpec, host: str) -> ReplicaStatus:
    """Return the status of a ready replica."""
    status = first_status(spec, 1)
    port = 10_000 + abs(hash(spec.id)) % 50_000
    processes = tuple(
        replace(process, state=ProcessState.READY, socket=f"{host}:{port}", pid=1) for process in status.processes
    )
    return replace(status, processes=processes)


def api(number: int) -> Api:
    handler = {"interface": "handler", "type": "python", "path": "handler.py"}
    scaling = {"min_replicas": PER_API, "max_replicas": PER_API}
    return Api.model_validate({"name": f"api-{number}", "handler": handler, "autoscaling": scaling})


def spec_of(home: Path, name: str, number: int) -> ReplicaSpec:
    replica_id = f"{name}-aaaaaaaa-{number:06x}"
    return ReplicaSpec(
        replica_id, name, "revision", "handler", str(home / "projects" / "hash"), "handler.py", "python",
        str(home / "run/replicas" / replica_id), (str(home / "run/s" / replica_id),), str(home / "run/s/c"),
        str(home / "logs" / name / f"{replica_id}.log"),
    )  # fmt: skip


async def measure(count: int, folder: Path) -> list[str]:
    """Return a row of the table."""
    home, node_home = Home(folder / "home"), folder / "node"
    home.create()
    names = [f"api-{number // PER_API}" for number in range(count)]
    specs = [spec_of(node_home, name, number) for number, name in enumerate(names)]
    nodes = []
    for start in range(0, count, PER_NODE):
        number = start // PER_NODE
        host = f"127.{100 + number // 62_500}.{number // 250 % 250}.{number % 250 + 1}"
        nodes.append(ScriptedNode(host, node_home, {spec.id: spec for spec in specs[start : start + PER_NODE]}))
    await asyncio.gather(*(node.start() for node in nodes))
    found: dict[str, Placement] = {}
    for node in nodes:
        address = NodeAddress(node.host, node.host, node.port)
        for name in node._replicas:
            found[name] = Placement(name, "placed", address, 0.0)
    engine = ClusterEngine(
        home,
        NoPlacer(found),
        CREDENTIALS,
        KnownNodes(KeyValueStore(open_state(folder / "state.db"))),
        Logger("limits"),
    )
    engine._mirror.refresh = _nothing  # type: ignore[method-assign] - scripted nodes count nothing
    wall, used = time.perf_counter(), time.process_time()
    await engine.startup(lambda: None, lambda spec: None)
    while len(engine.replicas()) < count:
        await asyncio.sleep(0.05)
    adopted, adopting = time.perf_counter() - wall, time.process_time() - used
    used = time.process_time()
    await asyncio.sleep(_FOLLOWED_S)
    idle = (time.process_time() - used) / _FOLLOWED_S
    used = time.process_time()
    for node in nodes:
        node.change()
    await asyncio.sleep(2)
    change = (time.process_time() - used - 2 * idle) / len(nodes)
    replicas = [Replica(spec, status) for spec, status in engine.replicas().values()]
    passing = _one_pass(replicas, count)
    row = [f"{count:,}", f"{len(nodes):,}", f"{adopted:.1f} s", f"{adopting:.1f} s", f"{idle * 100:.1f} %"]
    row += [f"{change * 1e6:.0f} µs", f"{passing * 1000:.0f} ms"]
    row += await _haproxy(home, replicas)
    await engine.shutdown()
    row.append(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
    return row


async def _nothing(_: object) -> None: ...


def _one_pass(replicas: list[Replica], count: int) -> float:
    now = datetime.now(UTC)
    records = []
    for number in range(-(-count // PER_API)):
        target = Revision("revision", api(number), "hash")
        records.append(
            ApiRecord(target.spec.name, target.spec.kind, None, target, "", "", f"id-{number}", now, now, target)
        )
    states = {(record.name, record.revision): Preparation(Stage.DONE) for record in records}
    used = time.process_time()
    actions = plan(records, replicas, states, time.time())
    routes_of(records, replicas, states)
    assert not actions, actions[:3]
    return time.process_time() - used


async def _haproxy(home: Home, replicas: list[Replica]) -> list[str]:
    """Return HAProxy's start time with the routes, the time to change one server, and its memory."""
    names = sorted({replica.spec.api for replica in replicas})
    now, records = datetime.now(UTC), []
    for number, name in enumerate(names):
        made = api(int(name.partition("-")[2]))
        target = Revision("revision", made, "hash")
        records.append(ApiRecord(name, made.kind, None, target, "", "", f"id-{number}", now, now, target))
    states = {(record.name, record.revision): Preparation(Stage.DONE) for record in records}
    full = replace(routes_of(records, replicas, states), gateway_secret=CREDENTIALS.gateway_secret)
    less = replace(routes_of(records, replicas[1:], states), gateway_secret=full.gateway_secret)
    gateway = HaproxyGateway(home, GatewaySettings("127.0.0.1", free_ports(1)[0]))
    started = time.perf_counter()
    await gateway.startup(less)
    up = time.perf_counter() - started
    started = time.perf_counter()
    await gateway.apply(full)
    change = time.perf_counter() - started
    started = time.perf_counter()
    await gateway.stats()
    stats = time.perf_counter() - started
    assert gateway.pid is not None
    master = psutil.Process(gateway.pid)
    memory = sum(process.memory_info().rss for process in [master, *master.children()])
    await gateway.stop()
    return [f"{up:.1f} s", f"{change * 1000:.0f} ms", f"{stats * 1000:.0f} ms", f"{memory / 2**20:.0f} MB"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator_limits", description=__doc__)
    parser.add_argument("--replicas", default="100,1000,5000")
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    columns = "replicas | nodes | adopted after | CPU of that | CPU when idle | CPU per change | CPU of a pass"
    columns += " | HAProxy starts in | one server added in | counts read in | HAProxy's memory | memory of all this"
    print(f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}")
    for count in map(int, arguments.replicas.split(",")):
        with tempfile.TemporaryDirectory(prefix="cx-", ignore_cleanup_errors=True) as folder:
            print(f"| {' | '.join(asyncio.run(measure(count, Path(folder))))} |", flush=True)


if __name__ == "__main__":
    main()
