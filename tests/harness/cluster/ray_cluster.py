"""A real Ray cluster on machines of its own (`machines.py`): a head without cores, and nodes that can be lost.

    with ray_cluster(nodes=3) as cluster:
        cluster.address, cluster.environ     # for whoever uses it, from here or from one of its machines
        cluster.nodes[0].kill()
        cluster.head.restart()

Every connection inside it requires a token. Deaths are detected fast: `HEALTH_CHECKS`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.cluster.machines import Machine, Network, network, require_machines, wait_for_port

PORT = 6379
#: A node that does not answer four times in a row is dead: after 10 s, instead of 62. Faster would be possible, but
#: where four test runs share two cores, a node that lives may need a second to answer.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
_SMALL = {
    "RAY_enable_worker_prestart": "0",
    "RAY_usage_stats_enabled": "0",
    "RAY_DEDUP_LOGS": "0",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
}
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
_START_TIMEOUT_S = 120


@functools.cache
def _ray() -> tuple[str, ...]:
    """Return Ray's command, by a path without a blank: Ray starts its client server by a shell line without quotes."""
    python = Path(sys.executable)
    if " " in str(python):
        folder = Path(tempfile.mkdtemp(prefix="cx-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / "venv").symlink_to(python.parent.parent)
        python = folder / "venv" / "bin" / python.name
    return (str(python), "-m", "ray.scripts.scripts")


@dataclass
class RayNode:
    """A machine with a node of the Ray cluster."""

    machine: Machine
    environ: dict[str, str]
    _arguments: list[str]

    @property
    def host(self) -> str:
        """Its address."""
        return self.machine.host

    def start(self) -> None:
        """Start the machine if necessary, and Ray on it; on a busy machine Ray's start may need several attempts."""
        if not self.machine.is_up:
            self.machine.start()
        for is_last in (False, False, True):
            try:
                self.machine.run([*_ray(), "start", *self._arguments], self.environ, _START_TIMEOUT_S)
                return
            except (AssertionError, subprocess.TimeoutExpired):
                if is_last:
                    raise
                self.kill_ray()

    def kill(self) -> None:
        """Kill the machine."""
        self.machine.kill()

    def restart(self) -> None:
        """Start it again after `kill` or `kill_ray`, with its address and its files."""
        self.start()

    def kill_ray(self) -> None:
        """Kill only the processes of Ray."""
        for pid in self.machine.pids():
            with contextlib.suppress(OSError):
                if self._is_of_ray(pid):
                    os.kill(pid, signal.SIGKILL)

    def partition(self) -> None:
        """Unplug its network; see `Machine.partition`."""
        self.machine.partition()

    def heal(self) -> None:
        """Plug its network in again."""
        self.machine.heal()

    def run(self, argv: Sequence[str], environ: Mapping[str, str] | None = None, timeout_s: float = 60) -> str:
        """Run a command on the machine in the environment of a client of the cluster; return its output."""
        return self.machine.run(argv, {**self.environ, **(environ or {})}, timeout_s).stdout

    def raylet_pid(self) -> int:
        """Return the pid, outside, of Ray's process on the node."""
        for pid in self.machine.pids():
            with contextlib.suppress(OSError):
                if b"/raylet/raylet\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError(f"no raylet runs on {self.machine.name}")

    def _is_of_ray(self, pid: int) -> bool:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"/site-packages/ray/" in command or command.startswith(b"ray::") or b"--gcs-address=" in command


@dataclass
class RayCluster:
    """A head without cores, and nodes. `ray_cluster` starts them."""

    network: Network
    head: RayNode
    environ: dict[str, str]
    folder: Path
    nodes: list[RayNode] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The address for Ray's clients, `host:port`."""
        return f"{self.head.host}:{PORT}"

    def add_node(self, cpus: int, groups: Sequence[str] = (), gpus: int = 0) -> RayNode:
        """Add a node, not yet started."""
        name = f"node{len(self.nodes) + 1}"
        arguments = ["--address", self.address, "--num-cpus", str(cpus), "--num-gpus", str(gpus)]
        arguments += ["--resources", json.dumps(dict.fromkeys(groups, 1))]
        node = _node(self.network, name, self.folder, self.environ, arguments)
        self.nodes.append(node)
        return node


@contextlib.contextmanager
def ray_cluster(
    nodes: int = 3,
    cpus: int = 4,
    groups: Mapping[int, Sequence[str]] | None = None,
    is_head_durable: bool = True,
    health_checks: Mapping[str, str] = HEALTH_CHECKS,
) -> Iterator[RayCluster]:
    """Start a cluster; skip the test if that is not possible.

    `groups` names node groups by the index of the node. Without `is_head_durable` a head that starts again has
    forgotten everything.
    """
    require_machines()
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"cxr{os.getpid()}-"))  # short: Ray's sockets are in it
    try:
        with network() as made:
            cluster = _make(made, folder, is_head_durable, health_checks)
            cluster.head.start()
            wait_for_port(cluster.head.host, PORT)
            for index in range(nodes):
                cluster.add_node(cpus, (groups or {}).get(index, ()))
            start_all(cluster.nodes)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers() -> None:
    for folder in Path(tempfile.gettempdir()).glob("cxr*-*"):
        owner = folder.name.removeprefix("cxr").partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _make(made: Network, folder: Path, is_head_durable: bool, health_checks: Mapping[str, str]) -> RayCluster:
    environ = {
        **health_checks,
        **_SMALL,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "head" / "gcs")}
    (folder / "head" / "gcs").mkdir(parents=True)
    arguments = ["--head", "--port", str(PORT), "--num-cpus", "0", "--no-monitor", "--include-dashboard=false"]
    head_environ = {**environ, **(storage if is_head_durable else {})}
    head = _node(made, "head", folder, head_environ, arguments)
    return RayCluster(made, head, environ, folder)


def _node(made: Network, name: str, folder: Path, environ: dict[str, str], arguments: list[str]) -> RayNode:
    ray_folder = folder / "ray"
    machine = made.add(name, folder / name, ray_folder)
    own = {"HOME": str(machine.folder), "CORTEX_NODE_HOME": str(machine.folder / "cortex")}
    common = ["--node-ip-address", machine.host, "--object-store-memory", str(_OBJECT_STORE_BYTES)]
    common += ["--disable-usage-stats", "--include-log-monitor=false", "--temp-dir", str(ray_folder)]
    return RayNode(machine, {**environ, **own}, [*arguments, *common])


def start_all(nodes: Sequence[RayNode]) -> None:
    """Start nodes one after another: a start takes seconds of CPU, and Ray's limit of 30 s for it has no setting."""
    for node in nodes:
        node.start()
