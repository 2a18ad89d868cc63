"""Gateways on nodes of a real Ray cluster, also while machines are gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.cluster_installation import (
    HAPROXY,
    NODE_AGENT,
    OPERATOR,
    OnRay,
    cluster_installation,
    installed,
    outside,
    pids,
)
from harness.cluster.ray_cluster import ray_cluster
from harness.installations.installation import write_project
from harness.servers.postgres import Postgres
from harness.wait import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(600)]

SOURCE = """
    class Handler:
        def __init__(self, config): ...
        def handle_post(self, payload):
            return {"twice": 2 * payload}
"""
CONFIG = """
    - name: doubler
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {access_log: true}
      autoscaling: {min_replicas: 2}
"""


def gateways(on_ray: OnRay) -> dict[str, str]:
    """Return the reasons of gateways without the newest routes, by node."""
    return {each["node"]: each["reason"] for each in on_ray.cortex.status()["gateways"]}


def ask(on_ray: OnRay, host: str) -> Any:
    """Send a request to the API through the gateway at an address, from another machine; return status or answer."""
    code = (
        "import sys, urllib.request as r, urllib.error as e\n"
        "request = r.Request(sys.argv[1], b'21', {'content-type': 'application/json'})\n"
        "try: print(r.urlopen(request, timeout=10).read().decode())\n"
        "except e.HTTPError as error: print(error.code)"
    )
    url = f"http://{host}:{on_ray.cortex.gateway_port}/doubler"
    return json.loads(on_ray.cluster.nodes[1].run(["python3", "-c", code, url]))


def test_gateways_of_nodes_outlive_the_machine_of_operator_and_head(tmp_path: Path) -> None:
    with cluster_installation(nodes=2) as on_ray:
        cortex, nodes = on_ray.cortex, on_ray.cluster.nodes
        assert gateways(on_ray) == {}
        cortex.cortex("deploy", write_project(tmp_path / "project", SOURCE, CONFIG))
        wait_until(lambda: len(on_ray.replicas("doubler")) == 2, 60)
        cortex.down()
        cortex.flags = (*cortex.flags, "--gateways", "all")
        cortex.up()
        wait_until(lambda: len(on_ray.replicas("doubler")) == 2, 60)
        hosts = [cortex.host, *(node.host for node in nodes)]
        wait_until(lambda: gateways(on_ray) == dict.fromkeys(hosts, ""), 60)
        assert "gateway on node" in (told := cortex.cortex("status").stdout) and "not running" not in told
        for host in hosts:
            assert ask(on_ray, host) == {"twice": 42}
        lines = wait_until(lambda: (found := access(on_ray)) and len(found) >= 3 and found)
        assert {line.get("gateway") for line in lines} == set(hosts)
        on_ray.cluster.head.kill()
        for node in nodes:
            assert ask(on_ray, node.host) == {"twice": 42}


def test_a_node_without_replicas_has_a_gateway_until_cortex_down(tmp_path: Path) -> None:
    with cluster_installation(nodes=1) as on_ray:
        cortex, node = on_ray.cortex, on_ray.cluster.nodes[0]
        cortex.down()
        cortex.flags = (*cortex.flags, "--gateways", "all")
        cortex.up()
        hosts = [cortex.host, node.host]
        assert pids(on_ray.cluster.head, HAPROXY), "`cortex up` waits for the gateway of its machine"
        wait_until(lambda: gateways(on_ray) == dict.fromkeys(hosts, ""), 60)
        assert pids(node, HAPROXY)
        assert "newest" in cortex.cortex("status").stdout
        before = pids(node, HAPROXY)
        on_ray.kill(node, NODE_AGENT)
        wait_until(lambda: pids(node, NODE_AGENT) and gateways(on_ray) == dict.fromkeys(hosts, ""), 60)
        assert pids(node, HAPROXY) == before
        cortex.down()
        wait_until(lambda: not on_ray.left(), message=f"still there: {on_ray.left()}")


def test_a_standby_on_a_node_leads_with_the_same_gateways_while_ray_is_away(tmp_path: Path, postgres: Postgres) -> None:
    with ray_cluster(nodes=2) as cluster, outside(cluster.network, postgres.port) as port:
        url = postgres.new_database().replace(f"127.0.0.1:{postgres.port}", f"{cluster.network.host}:{port}")
        with installed(cluster, url) as first, installed(cluster, url, cluster.nodes[0]) as second:
            for each in (first.cortex, second.cortex):
                each.down()
                each.gateway_port = first.cortex.gateway_port
                each.flags = (*each.flags, "--gateways", "all")
            first.cortex.up()
            second.cortex.up()
            first.cortex.cortex("deploy", write_project(tmp_path / "project", SOURCE, CONFIG))
            hosts = [first.cortex.host, *(node.host for node in cluster.nodes)]
            wait_until(lambda: gateways(first) == dict.fromkeys(hosts, ""), 60)
            before = [min(pids(node, HAPROXY)) for node in (cluster.head, *cluster.nodes)]
            cluster.head.kill_ray()
            first.kill(cluster.head, OPERATOR)
            wait_until(lambda: second.cortex.cortex("get", check=False).returncode == 0, 60)
            wait_until(lambda: gateways(second) == dict.fromkeys(hosts, ""), 60)
            assert [ask(second, host) for host in hosts] == [{"twice": 42}] * 3
            second.cortex.cortex("up")
            second.cortex.cortex("delete", "doubler", "--force")
            wait_until(lambda: [ask(second, host) for host in hosts] == [404] * 3)
            assert [min(pids(node, HAPROXY)) for node in (cluster.head, *cluster.nodes)] == before


def access(on_ray: OnRay) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in on_ray.cortex.cortex("logs", "doubler", "--access", "-o", "json").stdout.splitlines()
    ]
