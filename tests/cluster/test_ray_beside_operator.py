"""An operator on a node of its cluster reaches replicas on that node by unix sockets."""

from __future__ import annotations

import csv
import socket
from pathlib import Path

import pytest

from cortex.home import Home
from harness.cluster.cluster_installation import OnRay, installed
from harness.cluster.ray_cluster import RayCluster
from harness.installations.installation import write_project
from harness.wait import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(300)]

SOURCE = """
    import os

    class Handler:
        def __init__(self, config): ...
        def handle_post(self, payload):
            return {"pid": os.getpid(), "node": os.environ["HOME"]}
"""
CONFIG = """
    - name: where
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      compute: {cpu: 3}
      autoscaling: {min_replicas: 3}
"""


def addresses(on_ray: OnRay) -> list[str]:
    """Return the address of each process of the API at the gateway: `unix`, or `host:port`."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(Home(on_ray.cortex.home).sockets_dir / "gateway.sock"))
        sock.sendall(b"show stat\n")
        rows = csv.DictReader(sock.makefile().read().lstrip("# ").splitlines())
    return sorted(row["addr"] for row in rows if row["svname"].startswith("where-"))


def test_replicas_beside_the_operator_are_reached_by_their_unix_sockets(cluster: RayCluster, tmp_path: Path) -> None:
    with installed(cluster, place=cluster.nodes[0]) as on_ray:
        on_ray.cortex.cortex("deploy", write_project(tmp_path / "project", SOURCE, CONFIG))
        ready = on_ray.live("where", 3)
        hosts = sorted(node.host for node in cluster.nodes)
        assert sorted(each["node"] for each in ready) == hosts == on_ray.cortex.status()["cluster"]["nodes"]
        told = on_ray.cortex.cortex("status").stdout
        assert "3 nodes in use" in told
        assert all(host in told for host in hosts)
        found = wait_until(lambda: len(each := addresses(on_ray)) == 3 and each) or []  # the gateway follows
        assert found[-1] == "unix"
        assert [each.rpartition(":")[0] for each in found[:-1]] == sorted(node.host for node in cluster.nodes[1:])
        answers = [on_ray.cortex.post("/where", {}) for _ in range(30)]
        assert {answer.status for answer in answers} == {200}
        assert {answer.json["node"] for answer in answers} == {n.environ["HOME"] for n in cluster.nodes}
