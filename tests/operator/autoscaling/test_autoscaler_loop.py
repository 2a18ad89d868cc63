"""Autoscaler loop: samples, decisions and stored numbers."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.config.schema import Api
from cortex.engine.devices import Inventory
from cortex.errors import GatewayError
from cortex.operator.autoscaling.autoscaler import KEPT_DECISIONS, Autoscaler, AutoscalerIntervals, LoadSources
from cortex.operator.replicas.plan import wanted_replicas
from cortex.state.database import open_sqlite
from cortex.state.queries.apis import ApiChange, ApiStore
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaSpec, ReplicaStatus
from harness.replicas.fleet import READY, api, deployed, replica


class World:
    """Real store, scripted loads and a scripted clock."""

    def __init__(self, folder: Path) -> None:
        self.database = folder / "state.db"
        self.store = ApiStore(open_sqlite(self.database))
        self.now = 1000.0
        self.requests: dict[str, int] = {}
        self.workloads: dict[str, int] = {}
        self.cores: dict[str, float] = {}
        self.is_deaf = False
        self.is_broken = False
        self.looks = 0
        self.running: dict[str, tuple[ReplicaSpec, ReplicaStatus]] = {}
        self.inventory = Inventory()
        self.changes = 0
        self.scaling = self.operator()

    def operator(self, timing: AutoscalerIntervals = AutoscalerIntervals()) -> Autoscaler:  # noqa: B008 - it is frozen
        """Return the loop of an operator that starts now."""
        sources = LoadSources(self._requests, lambda name: self.workloads.get(name), self._cores)
        return Autoscaler(
            self.store, _Engine(self), sources, self._changed, Logger("test"), intervals=timing, clock=lambda: self.now
        )

    def deploy(self, spec: Api, revision: str = "r1", is_proven: bool = True) -> None:
        self.store.write([ApiChange(deployed(revision, spec), "nonce", "spec")])
        if is_proven:
            self.store.mark_serving(spec.name, deployed(revision, spec))

    def live(self, seconds: float, step_s: float = 1.0) -> None:
        """Advance the clock step by step."""

        async def run() -> None:
            for _ in range(round(seconds / step_s)):
                self.now += step_s
                await self.scaling.step()

        asyncio.run(run())

    def replicas(self, name: str = "iris") -> int:
        record = self.store.get(name)
        assert record
        return wanted_replicas(record)

    def reasons(self, name: str = "iris") -> list[str]:
        return [decision.reason for decision in self.scaling.decisions(name)]

    def replicas_of(self, count: int, **changes: object) -> None:
        """Add running replicas."""
        for number in range(count):
            made = replica(f"iris-{number}", READY)
            self.running[made.spec.id] = (replace(made.spec, **changes), made.status)  # type: ignore[arg-type]

    async def _requests(self) -> Mapping[str, int]:
        self.looks += 1
        if self.is_deaf:
            raise GatewayError("HAProxy does not answer")
        if self.is_broken:
            raise OSError("too many open files")
        return self.requests

    async def _cores(self, statuses: Iterable[ReplicaStatus]) -> Mapping[str, float]:
        return self.cores

    def _changed(self) -> None:
        self.changes += 1


class _Engine:
    """The two engine methods that the loop calls."""

    def __init__(self, world: World) -> None:
        self._world = world

    def devices(self) -> Inventory:
        return self._world.inventory

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        return self._world.running


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def scaled(**autoscaling: object) -> Api:
    return api(autoscaling={"window_s": 10, "upscale_stabilization_period_s": 0, **autoscaling})


def test_scales_up_under_load_and_down_when_idle(world: World) -> None:
    world.deploy(scaled(downscale_stabilization_period_s=0, max_replicas=3))
    world.requests = {"iris": 9}
    world.live(60)
    assert (world.replicas(), world.changes) == (3, 2)
    world.requests = {"iris": 0}
    world.live(60)
    assert (world.replicas(), world.changes) == (1, 4)


def test_changes_nothing_while_the_gateway_is_unreachable(world: World) -> None:
    world.deploy(scaled())
    world.store.set_replicas("iris", 5)
    world.is_deaf = True
    world.live(600)
    assert world.replicas() == 5
    assert set(world.reasons()) == {"no samples of the last 10 s"}


def test_the_next_operator_keeps_the_number_and_restarts_stabilisation(world: World) -> None:
    world.deploy(scaled(downscale_stabilization_period_s=100))
    world.store.set_replicas("iris", 5)
    world.requests = {"iris": 0}
    world.live(90)
    world.scaling = world.operator()
    world.live(90)
    assert world.replicas() == 5
    world.live(60)
    assert world.replicas() == 4


def test_a_deploy_restarts_stabilisation_and_keeps_the_samples(world: World) -> None:
    world.deploy(scaled(downscale_stabilization_period_s=50))
    world.store.set_replicas("iris", 5)
    world.requests = {"iris": 0}
    world.live(40)
    world.deploy(scaled(downscale_stabilization_period_s=50, max_replicas=4), revision="r2")
    assert world.replicas() == 4
    world.live(40)
    assert world.replicas() == 4
    assert len(world.reasons()) == 8  # earlier decisions are kept


def test_wakes_up_an_api_at_zero_replicas_at_once(world: World) -> None:
    world.deploy(scaled(min_replicas=0))
    world.store.set_replicas("iris", 0)
    world.requests = {"iris": 0}
    world.live(30)
    assert world.replicas() == 0
    world.requests = {"iris": 1000}
    world.live(0.1, step_s=0.1)
    assert world.replicas() == 1
    assert world.reasons() == ["1000 waiting at zero replicas: starting one at once"]


def test_an_idle_api_ends_its_last_replica_after_the_downscale_stabilization_period(world: World) -> None:
    world.deploy(scaled(min_replicas=0, downscale_stabilization_period_s=30))
    world.requests = {"iris": 1}
    world.live(60)
    world.requests = {"iris": 0}
    world.live(29)
    assert world.replicas() == 1
    world.live(1)
    assert world.replicas() == 0


def test_a_revision_that_never_served_keeps_one_replica(world: World) -> None:
    world.deploy(scaled(min_replicas=0, downscale_stabilization_period_s=0), is_proven=False)
    world.requests = {"iris": 0}
    world.live(60)
    assert world.replicas() == 1


def test_workloads_of_an_async_api_and_cores_count_in_place_of_requests(world: World) -> None:
    world.deploy(api("jobs", kind="AsyncAPI", autoscaling={"window_s": 10, "upscale_stabilization_period_s": 0}))
    world.deploy(api("old", deployment="d", autoscaling={"window_s": 10}))
    world.requests = {"jobs": 0, "old": 0}
    world.workloads = {"jobs": 2}
    world.cores = {"old": 0.45}
    world.live(30)
    assert (world.replicas("jobs"), world.replicas("old")) == (2, 3)


def test_the_capacity_of_the_machine_limits_the_number(world: World) -> None:
    world.deploy(scaled(max_upscale_factor=10))
    world.inventory = Inventory(cores=1.0, memory_bytes=2**40)
    world.replicas_of(1, cpu=0.2)
    world.requests = {"iris": 50}
    world.live(30)
    assert world.replicas() == 5
    expected = "no capacity for more: a replica needs 0.2 cores, but 0 of this machine's 1 are free"
    assert world.reasons()[0].endswith(expected)
    record = world.store.get("iris")
    assert record is not None
    wanted = "replicas are wanted, but there is room for 5: a replica needs 0.2 cores"
    assert wanted in world.scaling.shortage(record)


def test_ignores_requests_of_slow_clients(world: World) -> None:
    world.deploy(scaled())
    made = replica("iris-1", replace(READY, lent=50))
    world.running[made.spec.id] = (made.spec, made.status)
    world.requests = {"iris": 51}
    world.live(30)
    assert world.replicas() == 1


def test_cores_of_job_workers_count_as_free_but_their_memory_does_not(world: World) -> None:
    world.deploy(scaled(max_upscale_factor=10))
    world.inventory = Inventory(cores=1.0, memory_bytes=2**40)
    world.replicas_of(1, cpu=1.0, kind="BatchAPI", api="jobs")
    world.requests = {"iris": 50}
    world.live(30)
    assert world.replicas() == 5


def test_ignores_apis_with_a_fixed_size_and_keeps_a_limited_number_of_decisions(world: World) -> None:
    world.deploy(scaled(min_replicas=2, max_replicas=2))
    world.requests = {"iris": 50}
    world.live(30)
    assert world.reasons() == []
    world.deploy(scaled(max_replicas=2), revision="r2")
    world.live(10 * KEPT_DECISIONS + 50)
    assert len(world.reasons()) == KEPT_DECISIONS


def test_drops_the_state_of_deleted_apis(world: World) -> None:
    world.deploy(scaled())
    world.requests = {"iris": 1}
    world.live(20)
    world.store.write([], deletions=["iris"])
    world.live(20)
    assert world.reasons() == []


def test_retries_a_failed_step_after_a_pause(world: World) -> None:
    async def scenario() -> None:
        running = asyncio.create_task(world.operator(AutoscalerIntervals(sample_s=3600)).run())
        for _ in range(100):
            await asyncio.sleep(0)
        running.cancel()

    world.deploy(scaled())
    world.is_broken = True
    asyncio.run(scenario())
    assert world.looks == 1


def test_survives_an_unreadable_database(world: World) -> None:
    async def scenario() -> None:
        with contextlib.closing(sqlite3.connect(world.database, isolation_level=None)) as database:
            database.execute("ALTER TABLE apis RENAME TO elsewhere")
            running = asyncio.create_task(world.operator(AutoscalerIntervals(sample_s=0.001)).run())
            for _ in range(100):
                await asyncio.sleep(0)
            database.execute("ALTER TABLE elsewhere RENAME TO apis")
        async with asyncio.timeout(20):
            while not world.looks:
                assert not running.done()
                await asyncio.sleep(0.001)
        running.cancel()

    world.deploy(scaled())
    asyncio.run(scenario())
