"""Known nodes in the database."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from cluster.test_cluster_engine import cluster, ready, run
from cortex.cluster.credentials import ClusterCredentials
from cortex.cluster.engine import ClusterEngine
from cortex.cluster.known_nodes import KnownNodes
from cortex.cluster.placement import NodeAddress
from cortex.home import Home
from cortex.state.database import open_state
from cortex.state.queries.key_values import KeyValueStore
from cortex.telemetry import Logger
from harness.cluster.local_nodes import SECRET, LocalNode, StaticPlacer, local_nodes
from harness.homes import temporary_home

pytestmark = pytest.mark.processes

ONE, TWO, MOVED = NodeAddress("a", "10.0.0.1", 1), NodeAddress("b", "10.0.0.2", 1), NodeAddress("a", "10.0.0.1", 2)


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[KeyValueStore]:
    engine = open_state(tmp_path / "state.db")
    yield KeyValueStore(engine)
    engine.dispose()


@pytest.fixture
def nodes() -> Iterator[list[LocalNode]]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as made:
        yield made


def test_the_next_operator_loads_the_nodes(facts: KeyValueStore, tmp_path: Path) -> None:
    former = tmp_path / "nodes.json"
    former.write_text(json.dumps([asdict(ONE)]))
    assert KnownNodes(facts, former).all() == [ONE]
    known = KnownNodes(facts)
    assert known.all() == []
    for address in (ONE, TWO, MOVED):
        known.add(address)
    known.save()
    assert KnownNodes(facts, former).all() == [TWO, MOVED]
    known.remove(TWO.host)
    known.save()
    assert KnownNodes(facts, former).all() == [MOVED]


def test_a_failed_write_is_retried(facts: KeyValueStore) -> None:
    known = KnownNodes(facts)
    known.add(ONE)
    for is_read_only, found in ((1, []), (0, [ONE])):
        with closing(facts._engine.raw_connection()) as connection:  # the pool has one
            connection.cursor().execute(f"PRAGMA query_only = {is_read_only}")
        known.save()
        assert KnownNodes(facts).all() == found


class HangingPlacer(StaticPlacer):
    """A placer whose Ray accepts connections and never answers."""

    async def startup(self, on_change: Callable[[], None]) -> None:
        await super().startup(on_change)
        await asyncio.Event().wait()


def test_an_operator_on_another_machine_adopts_replicas_while_ray_is_away(
    home: Home, nodes: list[LocalNode], facts: KeyValueStore
) -> None:
    async def test(other: Home) -> None:
        known = KnownNodes(facts)
        async with cluster(home, nodes) as made:
            known.add(nodes[0].address)
            known.save()
            spec = made.spec()
            before = await ready(made, spec)
        placer = HangingPlacer([], is_available=False)
        engine = ClusterEngine(
            other, placer, ClusterCredentials(SECRET, "127.0.0.1", 0, 2), KnownNodes(facts), Logger("test")
        )
        async with asyncio.timeout(60):
            await engine.startup(lambda: None, lambda spec: None)
        try:
            adopted, status = engine.replicas()[spec.id]
            assert status == before
            assert adopted.project_dir.startswith(str(other.path))
            await engine.stop(spec.id, 5)
            async with asyncio.timeout(60):
                while engine.replicas():
                    await asyncio.sleep(0.02)
        finally:
            await engine.shutdown()

    with temporary_home() as other:
        run(test(other))
