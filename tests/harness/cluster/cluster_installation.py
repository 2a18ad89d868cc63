"""A private installation whose replicas run on a real Ray cluster; its operator runs on one of the machines.

    with cluster_installation() as on_ray:
        on_ray.cortex.cortex("deploy", folder)      # in the head's namespaces
        on_ray.node_of("doubler").kill()

All machines see the same files, except those that `ray_cluster.py` makes private, and reach this one by `outside`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cortex.client.client import Client
from cortex.client.environments import Environments
from cortex.errors import CortexError
from cortex.home import Home
from cortex.installation import Installation as Made
from harness.cluster.machines import Network
from harness.cluster.ray_cluster import RayCluster, RayNode, ray_cluster, start_all
from harness.installations.installation import Installation
from harness.ports import free_port
from harness.wait import wait_until

#: The environment that leads to the operator from outside of the head's namespaces.
FROM_HERE = "cluster"
#: What a process of each kind has in its command line.
OPERATOR, BRIDGE, NODE_AGENT = b"cortex.operator.main", b"cortex.cluster.ray_bridge", b"cortex.cluster.node.agent\0"
SUPERVISOR, MODEL_AGENT, HAPROXY = b"cortex.supervisor.supervisor", b"cortex.models.agent.agent", b"haproxy"
#: All that is ours and not Ray's, nor a command that somebody runs.
OURS = (OPERATOR, BRIDGE, NODE_AGENT, SUPERVISOR, MODEL_AGENT, HAPROXY)


@dataclass
class OnRay:
    """A cluster and the installation on it."""

    cluster: RayCluster
    cortex: Installation

    @property
    def client(self) -> Client:
        """The Python client, on this machine."""
        return self.cortex.client

    def replicas(self, api: str) -> list[dict[str, Any]]:
        """Return the ready processes of an API's replicas, as in `cortex status`."""
        found = [each for each in self.cortex.status()["replicas"] if each["api"] == api]
        return [each for each in found if each["state"] == "ready"]

    def live(self, api: str, count: int, but: set[str] | frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """Wait until an API has this many ready processes outside of the replicas `but`; return them."""

        def there() -> list[dict[str, Any]] | None:
            try:
                found = self.replicas(api)
            except (CortexError, AssertionError) as error:  # of the client, or of the command
                if "this operator stands by" in str(error):  # a slow database cost it the lead, which it gets again
                    return None
                raise
            return found if len(found) == count and not but & {each["id"] for each in found} else None

        try:
            return wait_until(there, 60) or []
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.trace()}") from None

    def node_of(self, api: str) -> RayNode:
        """Return a node that has a ready replica of an API."""
        return self.nodes_of(api)[0]

    def nodes_of(self, api: str) -> list[RayNode]:
        """Return the nodes with a supervisor of an API's replicas."""
        return [node for node in self.cluster.nodes if self.supervisors(node, api)]

    def supervisors(self, node: RayNode, api: str = "") -> list[int]:
        """Return the supervisors, and the workers that they forked, of an API's replicas on a node."""
        return pids(node, SUPERVISOR, f"/{api}-".encode() if api else b"")

    def kill(self, node: RayNode, what: bytes, with_text: bytes = b"") -> list[int]:
        """Kill processes on a node; return them. Raises: AssertionError if there are none."""
        found = pids(node, what, with_text)
        assert found, f"no {what.decode()} on {node.machine.name}"
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not set(found) & set(pids(node, what, with_text)))
        return found

    def restore(self, node: RayNode) -> None:
        """Restart a node that was killed, or whose Ray was. Not from a thread that ends."""
        if not node.machine.is_up:
            node.machine.start()
        node.restart()

    def left(self) -> list[str]:
        """Return the command lines of all processes of cortex on all machines."""
        found = []
        for node in (self.cluster.head, *self.cluster.nodes):
            if node.machine.is_up:
                for pid in node.machine.pids():
                    command = _command(pid)
                    if any(each in command for each in OURS):
                        found.append(f"{node.machine.name}: {command.replace(bytes(1), b' ').decode()[:200]}")
        return found

    def said(self) -> Callable[[], str]:
        """Return a function that returns the operator's log from now on."""
        log = self.cortex.home / "logs" / "operator.log"
        size = log.stat().st_size
        return lambda: log.read_bytes()[size:].decode(errors="replace")  # the end of a character may be missing

    def trace(self) -> str:
        """Return the ends of all logs."""
        folders = [self.cortex.home, *(Path(node.environ["CORTEX_NODE_HOME"]) for node in self.cluster.nodes)]
        files = [file for folder in folders for file in folder.glob("**/*") if file.name in _LOGS]
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-4000:]}" for file in files)


_LOGS = ("operator.log", "ray.log", "node.log", "node.output")


@contextlib.contextmanager
def cluster_installation(
    nodes: int = 3,
    cpus: int = 4,
    variables: Callable[[Network], Mapping[str, str]] = lambda network: {},
    database: Callable[[Network], str | None] = lambda network: None,
    is_head_durable: bool = True,
    groups: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[OnRay]:
    """Start a cluster and an operator; everything of both is gone afterwards.

    `variables` are those of nodes and operator, `database` is the operator's; both may name the network's `host`, at
    which machines reach this one. `groups` names node groups by the index of the node. Skips the test where there can
    be no cluster.
    """
    with ray_cluster(nodes=0, is_head_durable=is_head_durable) as cluster:
        cluster.environ.update(variables(cluster.network))
        for index in range(nodes):
            cluster.add_node(cpus, (groups or {}).get(index, ()))
        start_all(cluster.nodes)
        with installed(cluster, database(cluster.network)) as on_ray:
            yield on_ray


@contextlib.contextmanager
def installed(cluster: RayCluster, database: str | None = None, place: RayNode | None = None) -> Iterator[OnRay]:
    """Start an operator on a machine of a cluster, the head if none is given."""
    place = place or cluster.head
    home = Path(tempfile.mkdtemp(prefix="cx-"))
    made = Made(engine="ray", ray_address=cluster.address, advertise=place.host, database=database)
    replace(made, node_port=free_port()).write(Home(home))
    cortex = Installation(
        home,
        free_port(),
        free_port(),
        {**cluster.environ, **place.environ},
        place.host,
        tuple(place.machine.command([])),
        flags=("--host", place.host),
        environment=FROM_HERE,
    )
    try:
        cortex.up()
        token = (home / "token").read_text().strip()
        url = f"http://{place.host}:{cortex.operator_port}"
        Environments.from_environ(cortex.environ).configure(FROM_HERE, url, token)
        yield OnRay(cluster, cortex)
    finally:
        cortex.down()
        shutil.rmtree(home, ignore_errors=True)


def pids(node: RayNode, what: bytes, with_text: bytes = b"") -> list[int]:
    """Return the processes on a node with both texts in their command lines, by their pids outside."""
    running = node.machine.pids() if node.machine.is_up else []
    return [pid for pid in running if what in (command := _command(pid)) and with_text in command]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextlib.contextmanager
def outside(network: Network, port: int) -> Iterator[int]:
    """Forward a port of this machine's loopback address to the machines; yields the port they use."""
    with socket.create_server((network.host, 0)) as listener:
        threading.Thread(target=_accept, args=(listener, port), daemon=True).start()
        yield int(listener.getsockname()[1])
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, port: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", port))
            except OSError:
                client.close()
                continue
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
