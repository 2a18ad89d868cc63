"""Real node agents on this machine, each at its own loopback address, and a placer without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cortex.cluster.credentials import ClusterCredentials
from cortex.cluster.node.agent import IDENTITY_FILE
from cortex.cluster.placement import Amounts, ClusterResources, NodeAddress, NodeResources, Placement, Resources
from cortex.home import Home
from harness.wait import wait_until

SECRET = "a secret of tests"
CREDENTIALS = ClusterCredentials(SECRET, "127.0.0.1", 0)


@dataclass
class LocalNode:
    """One agent."""

    home: Home
    host: str
    process: subprocess.Popen[bytes] | None = None
    environ: dict[str, str] = field(default_factory=dict)  #: besides ours

    @property
    def address(self) -> NodeAddress:
        return NodeAddress(self.host, self.host, int(json.loads(self._file.read_text())["port"]))

    @property
    def _file(self) -> Path:
        return self.home.run_dir / IDENTITY_FILE

    def start(self) -> None:
        """Start the agent; return once it listens."""
        before = self._file.read_text() if self._file.exists() else ""
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "cortex.cluster.node.agent",
                "--home",
                str(self.home.path),
                "--host",
                self.host,
            ],
            stdin=subprocess.PIPE,
            env={**os.environ, **self.environ},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(f"{CREDENTIALS.for_nodes}\n".encode())
        self.process.stdin.close()
        wait_until(lambda: self._file.exists() and self._file.read_text() != before)

    def kill(self) -> None:
        """Kill the agent; its replicas stay."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop_all(self) -> None:
        """End the agent and everything that runs in its home."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.home.path) in part for part in process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.Error):
                    for child in [*process.children(recursive=True), process]:
                        with contextlib.suppress(psutil.Error):  # that one has ended, others have not
                            child.send_signal(signal.SIGKILL)
        shutil.rmtree(self.home.metrics_dir, ignore_errors=True)  # it may be outside of the home


@dataclass
class StaticPlacer:
    """A real placer for a fixed set of nodes; it reserves cores."""

    nodes: list[NodeAddress]
    cores: float = 4.0
    on_change: Callable[[], None] = lambda: None
    found: dict[str, Placement] = field(default_factory=dict)
    wanted: dict[str, Resources] = field(default_factory=dict)
    is_available: bool = True
    reason: str = ""

    async def startup(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change

    async def shutdown(self) -> None: ...

    async def place(self, name: str, resources: Resources, node_id: str = "", preferred: str = "") -> None:
        self.wanted[name] = resources
        self._look(name, node_id, preferred)

    async def remove(self, name: str) -> None:
        self.wanted.pop(name, None)
        self.found.pop(name, None)
        for waiting in [other for other, placement in self.found.items() if placement.state == "pending"]:
            self._look(waiting)
        self.on_change()

    def placements(self) -> dict[str, Placement]:
        return dict(self.found)

    def resources(self) -> ClusterResources | None:
        if not self.is_available:
            return None
        nodes = {node.node_id: NodeResources(node.host, self.cores, 2**34, 0) for node in self.nodes}
        total = self.cores * len(nodes)
        return ClusterResources(Amounts(total), Amounts(sum(map(self._free, self.nodes))), nodes)

    def lose(self, node: NodeAddress) -> None:
        """Remove a node with its reservations."""
        self.nodes = [other for other in self.nodes if other.host != node.host]

    def _free(self, node: NodeAddress) -> float:
        held = [self.wanted[name].cpu for name, placement in self.found.items() if placement.node == node]
        return self.cores - sum(held)

    def _look(self, name: str, node_id: str = "", preferred: str = "") -> None:
        self.found.pop(name, None)
        fitting = [
            node
            for node in self.nodes
            if self._free(node) >= self.wanted[name].cpu and (not node_id or node.node_id == node_id)
        ]
        best = max(fitting, key=lambda node: (node.node_id == preferred, self._free(node)), default=None)
        self.found[name] = Placement(name, "placed" if best else "pending", best, time.monotonic())
        self.on_change()


@contextlib.contextmanager
def local_nodes(folder: Path, count: int, environ: dict[str, str] | None = None) -> Iterator[list[LocalNode]]:
    """Start agents; remove all their processes and files afterwards."""
    net = 1 + os.getpid() % 250  # several test processes run at once
    hosts = [f"127.{net}.0.{number + 1}" for number in range(count)]
    nodes = [LocalNode(Home(folder / f"n{host}"), host, environ=environ or {}) for host in hosts]
    try:
        for node in nodes:
            node.home.create()
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.stop_all()
