"""One Ray cluster, shared by all tests that need three nodes and an operator, because its start takes long."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import uv

from cortex.config.schema import Dependencies
from cortex.engine.environment import prepare_environment
from cortex.home import Home
from harness.cluster.cluster_installation import OnRay, installed, outside
from harness.cluster.machines import Network, require_machines
from harness.cluster.ray_cluster import RayCluster, ray_cluster, start_all
from harness.installations.example_cases import EXAMPLES_DIR
from harness.servers import s3
from harness.servers.buckets import RemoteBucket, start_swift
from harness.wait import wait_until


@dataclass(frozen=True)
class Surroundings:
    """Servers outside of the cluster that its machines use."""

    bucket: RemoteBucket | None  #: None where no Swift is installed
    environ: Mapping[str, str]  #: of its clients on this machine


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    """Start an S3 endpoint."""
    require_machines()
    folder = tmp_path_factory.mktemp("surroundings")
    if not s3.is_installed() and not os.environ.get("CI"):
        yield Surroundings(None, {})
        return
    server = start_swift(folder / "s")
    yield Surroundings(RemoteBucket("s3://models", server), server.environ)
    server.stop()


@pytest.fixture(scope="session")
def cached_packages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fill uv's cache with the packages of the examples."""
    asyncio.run(_fill_cache(Home(tmp_path_factory.mktemp("cached") / "home")))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[RayCluster]:
    """A head and three nodes of four cores; a test that kills a node restarts it."""
    require_machines()
    # Nodes must know the S3 endpoint when they start; it costs seconds, and only some tests use it.
    uses_bucket = any("surroundings" in item.fixturenames for item in request.session.items)
    surroundings = request.getfixturevalue("surroundings") if uses_bucket else Surroundings(None, {})
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_cluster(nodes=0))
        cluster.environ.update(_variables(surroundings, cluster.network, stack))
        for _ in range(3):
            cluster.add_node(cpus=4)
        start_all(cluster.nodes)
        yield cluster


@pytest.fixture(scope="module")
def on_ray(cluster: RayCluster) -> Iterator[OnRay]:
    """A private operator of a test module."""
    with installed(cluster) as made:
        yield made
        made.cortex.down()
        try:
            wait_until(lambda: not made.left(), 10)
        except AssertionError:
            raise AssertionError(f"left on machines: {made.left()}") from None


def _variables(surroundings: Surroundings, network: Network, stack: ExitStack) -> dict[str, str]:
    """Machines can't reach a package index; they install from the cache that they share with this one."""
    found = {"UV_CACHE_DIR": _cache_dir(), "UV_OFFLINE": "1"}
    if surroundings.bucket is not None:
        server = surroundings.bucket.server
        assert isinstance(server, s3.SwiftServer)
        port = stack.enter_context(outside(network, server.ports["proxy"]))
        found |= {name: value for name, value in server.environ.items() if name != "HOME"}
        found |= {"AWS_ENDPOINT_URL_S3": f"http://{network.host}:{port}", "NO_PROXY": network.host}
    return found


def _cache_dir() -> str:
    done = subprocess.run([uv.find_uv_bin(), "cache", "dir"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


async def _fill_cache(home: Home) -> None:
    """Create the environments of all examples here, as nodes will."""
    home.create()
    for folder in sorted(EXAMPLES_DIR.iterdir()):
        if (folder / "cortex.yaml").exists() and "tensorflow" not in folder.name:
            await prepare_environment(home, folder, Dependencies(), os.environ)
