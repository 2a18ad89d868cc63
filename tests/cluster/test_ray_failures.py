"""Failures of each part of a real Ray cluster under load, with the state in PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cortex.cluster.node.start import Priority
from cortex.home import Home
from cortex.installation import Installation as Made
from harness.cluster.cluster_installation import BRIDGE, NODE_AGENT, OPERATOR, OnRay, installed, outside, pids
from harness.cluster.ray_cluster import RayCluster, RayNode
from harness.installations.installation import write_project
from harness.servers.postgres import Postgres
from harness.wait import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.processes, pytest.mark.timeout(600)]
CONNECTIONS = 16
REPLICAS = 3
SOURCE = """
    import os

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return {"pid": os.getpid()}
"""
CONFIG = """
    - name: {name}
      kind: RealtimeAPI
      handler: {{type: python, path: handler.py}}
      compute: {{cpu: {cpu}}}
      autoscaling: {{min_replicas: {replicas}, max_replicas: {replicas}}}
"""


@pytest.fixture(scope="module")
def on_ray(cluster: RayCluster, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    """An operator that keeps its state in PostgreSQL, an API with a replica on each node, and one with one replica."""
    with outside(cluster.network, postgres.port) as port:
        url = postgres.new_database().replace(f"127.0.0.1:{postgres.port}", f"{cluster.network.host}:{port}")
        with installed(cluster, url) as made:
            for name, replicas in (("spread", REPLICAS), ("single", 1)):
                folder = tmp_path_factory.mktemp(name)
                config = CONFIG.format(name=name, replicas=replicas, cpu=0.5)
                made.cortex.cortex("deploy", write_project(folder, SOURCE, config), timeout_s=300)
            yield made


@pytest.fixture(autouse=True)
def whole(on_ray: OnRay) -> Iterator[None]:
    """Wait before and after each test until all nodes and reserved replicas are there."""
    said = on_ray.said()
    yield
    print(said())  # shown where the test fails
    for node in on_ray.cluster.nodes:
        if not has_raylet(node):
            on_ray.restore(node)
    on_ray.live("spread", REPLICAS)
    on_ray.live("single", 1)


def has_raylet(node: RayNode) -> bool:
    with contextlib.suppress(AssertionError):
        return bool(node.machine.is_up and node.raylet_pid())
    return False


def failed(load: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the requests whose response was not 200."""
    assert load["sent"] > 0
    assert sum(load["statuses"].values()) == load["sent"]
    found: list[dict[str, Any]] = load["failures"]
    return found


def fewer_than_inside(load: dict[str, Any]) -> None:
    """Check that no more requests failed than there are connections: those inside the ended process."""
    assert len(failed(load)) <= CONNECTIONS, load["failures"]


def answers(on_ray: OnRay, api: str, rounds: int = 300) -> None:
    """Check that no request fails from now on."""
    for _ in range(rounds):
        reply = on_ray.cortex.post(f"/{api}", {})
        assert reply.status == 200, reply


def replicas_of(on_ray: OnRay, node: RayNode, api: str) -> set[str]:
    """Return the replicas on a node, from the command lines of its supervisors."""
    found = set()
    for pid in on_ray.supervisors(node, api):
        with contextlib.suppress(OSError, IndexError):  # it has ended, or is a zombie, whose command line is empty
            spec = Path(f"/proc/{pid}/cmdline").read_bytes().split(bytes(1))[-2].decode()
            found.add(Path(spec).parent.name)
    return found


def only_node_of(on_ray: OnRay, api: str) -> RayNode:
    """Return the node of an API with one replica, once another one that a test before this caused has ended."""
    wait_until(lambda: len(on_ray.nodes_of(api)) == 1, 60, "one node has a replica")
    return on_ray.node_of(api)


def leads_group(pid: int) -> bool:
    """Return whether it is a supervisor or a worker, and not a process that deletes or compiles files for a while."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


def test_replicas_have_the_priority_of_ray_itself(on_ray: OnRay) -> None:
    node = only_node_of(on_ray, "single")
    of_ray = Priority.of(node.raylet_pid())
    workers = psutil.Process(node.raylet_pid()).children()
    assert any(Priority.of(worker.pid).niceness > of_ray.niceness for worker in workers)
    [agent] = pids(node, NODE_AGENT)
    assert Priority.of(agent) == of_ray
    # Whichever is killed where memory is short, it is the user's code before the supervisor.
    assert {Priority.of(pid).niceness for pid in on_ray.supervisors(node, "single")} == {of_ray.niceness}


def test_a_killed_node_fails_only_its_own_requests(on_ray: OnRay) -> None:
    node = on_ray.node_of("spread")
    lost = replicas_of(on_ray, node, "spread")
    with on_ray.cortex.load("/spread", 100, CONNECTIONS) as load:
        node.kill()
        on_ray.live("spread", REPLICAS, but=lost)
    fewer_than_inside(load)
    answers(on_ray, "spread")


@pytest.mark.long
def test_a_node_that_is_cut_off_is_lost_and_adopted_again(on_ray: OnRay) -> None:
    node = on_ray.node_of("spread")
    lost = replicas_of(on_ray, node, "spread")
    with on_ray.cortex.load("/spread", 100, CONNECTIONS) as load:
        node.partition()
        on_ray.live("spread", REPLICAS, but=lost)
    fewer_than_inside(load)
    said = on_ray.said()
    with on_ray.cortex.load("/spread", 100, CONNECTIONS) as load:
        answers(on_ray, "spread")
        node.heal()
        wait_until(lambda: "replica adopted" in said(), 60, "what runs there is taken up")

        def as_many_as_wanted() -> bool:
            return sum(len(replicas_of(on_ray, each, "spread")) for each in on_ray.cluster.nodes) == REPLICAS

        wait_until(as_many_as_wanted, 60, "those that are too many have ended")
    assert failed(load) == []


@pytest.mark.long
def test_a_killed_worker_fails_only_its_own_requests(on_ray: OnRay) -> None:
    node = on_ray.node_of("spread")
    with on_ray.cortex.load("/spread", 100, CONNECTIONS) as load:
        worker = max(filter(leads_group, on_ray.supervisors(node, "spread")))  # forked by the other
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: worker not in on_ray.supervisors(node, "spread"))
        on_ray.live("spread", REPLICAS)
    fewer_than_inside(load)
    answers(on_ray, "spread")


def test_a_killed_agent_is_restarted_and_no_request_fails(on_ray: OnRay) -> None:
    node = only_node_of(on_ray, "single")
    before, said = replicas_of(on_ray, node, "single"), on_ray.said()
    with on_ray.cortex.load("/single", 100, CONNECTIONS) as load:
        killed = on_ray.kill(node, NODE_AGENT)
        wait_until(lambda: set(pids(node, NODE_AGENT)) - set(killed), 30, "another agent runs")
        wait_until(lambda: f"node is up node={node.host}" in said(), 30, "the operator follows it")
    assert failed(load) == []
    assert replicas_of(on_ray, node, "single") == before


@pytest.mark.long
def test_a_replica_whose_raylet_is_killed_serves_until_another_does(on_ray: OnRay) -> None:
    node = only_node_of(on_ray, "single")
    before = replicas_of(on_ray, node, "single")
    with on_ray.cortex.load("/single", 100, CONNECTIONS) as load:
        os.kill(node.raylet_pid(), signal.SIGKILL)
        on_ray.live("single", 1, but=before)
    assert failed(load) == []


@pytest.mark.long
@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "forgetful"])
def test_no_request_fails_while_rays_head_restarts(on_ray: OnRay, is_durable: bool) -> None:
    head, said = on_ray.cluster.head, on_ray.said()
    with on_ray.cortex.load("/spread", 50, CONNECTIONS) as load:
        head.kill_ray()
        if not is_durable:
            shutil.rmtree(head.machine.folder / "gcs")
        answers(on_ray, "single", 50)
        head.restart()
        for node in on_ray.cluster.nodes:
            if not is_durable:  # Ray ends its nodes once their head has forgotten them
                wait_until(lambda node=node: not has_raylet(node), 60, "Ray's nodes end")
                on_ray.restore(node)
        wait_until(lambda: "connected to Ray" in said(), 60, "the operator knows it")
        on_ray.live("spread", REPLICAS)
    assert failed(load) == []


@pytest.mark.long
def test_no_request_fails_while_operator_and_bridge_restart(on_ray: OnRay) -> None:
    head, before = on_ray.cluster.head, {each["id"] for each in on_ray.replicas("spread")}
    with on_ray.cortex.load("/spread", 100, CONNECTIONS) as load:
        on_ray.kill(head, BRIDGE)
        wait_until(lambda: pids(head, BRIDGE), 30)
        on_ray.kill(head, OPERATOR)
        on_ray.cortex.up()
        after = {each["id"] for each in on_ray.live("spread", REPLICAS)}
    assert failed(load) == []
    assert after == before


@pytest.mark.long
def test_another_operator_takes_over_and_no_request_fails(on_ray: OnRay) -> None:
    head, before = on_ray.cluster.head, {each["id"] for each in on_ray.replicas("spread")}

    def kill(made: OnRay) -> None:
        on_ray.kill(head, OPERATOR, f"--operator-port\0{made.cortex.operator_port}\0".encode())

    def leads(made: OnRay) -> bool:
        return made.cortex.cortex("get", check=False).returncode == 0

    database = Made.read(Home(on_ray.cortex.home)).database
    with installed(on_ray.cluster, database) as second, on_ray.cortex.load("/spread", 100, CONNECTIONS) as load:
        for one, other in ((on_ray, second), (second, on_ray)):
            kill(one)
            began = time.monotonic()
            wait_until(lambda other=other: leads(other), 10, "the other leads")
            print(f"another operator led after {time.monotonic() - began:.1f} s")
            assert {each["id"] for each in other.live("spread", REPLICAS)} == before
            if one is on_ray:
                one.cortex.up()
                assert not leads(one)
    assert failed(load) == []


@pytest.mark.long
def test_no_request_fails_while_postgresql_restarts(on_ray: OnRay, postgres: Postgres) -> None:
    before = {each["id"] for each in on_ray.replicas("spread")}
    with on_ray.cortex.load("/spread", 100, CONNECTIONS) as load:
        postgres.kill()
        answers(on_ray, "single")
        postgres.start()
        wait_until(lambda: on_ray.cortex.cortex("get", check=False).returncode == 0, 60, "the operator answers")
        on_ray.live("spread", REPLICAS)
    assert failed(load) == []
    assert {each["id"] for each in on_ray.replicas("spread")} == before


def test_an_unschedulable_api_shows_its_request_and_the_largest_node(on_ray: OnRay, tmp_path: Path) -> None:
    project = write_project(tmp_path, SOURCE, CONFIG.format(name="huge", replicas=1, cpu=9))
    done = on_ray.cortex.cortex("deploy", project, check=False)
    assert done.returncode == 1
    assert "a replica needs 9 cores; the largest node has 4 cores" in done.stdout + done.stderr
    on_ray.cortex.cortex("delete", "huge", "-f")
