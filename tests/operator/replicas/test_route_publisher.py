from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

from cortex.errors import GatewayError
from cortex.gateway.routes import ApiBackend, RoutingTable
from cortex.operator.replicas.routing import FAILING_AFTER_S, LATE_AFTER_S, RoutePublisher
from cortex.telemetry import Logger
from harness.wait import PATIENCE_S


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def table(name: str) -> RoutingTable:
    return RoutingTable((ApiBackend(name, f"/{name}", 60, 1, 1, "starting"),))


class Recorder:
    """Gateway that applies tables when its gate is open."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.errors = 0
        self.error: Exception = GatewayError("not now")
        self.gate = asyncio.Event()

    async def apply(self, table: RoutingTable) -> None:
        await self.gate.wait()
        if self.errors:
            self.errors -= 1
            raise self.error
        self.applied.append(table.backends[0].api)

    async def drained(self, names: Collection[str]) -> set[str]:
        return set(names)


@contextlib.asynccontextmanager
async def publishing() -> AsyncIterator[tuple[Recorder, RoutePublisher]]:
    gateway = Recorder()
    publisher = RoutePublisher(gateway, lambda: None, Logger("test"))
    task = asyncio.create_task(publisher.run())
    async with asyncio.timeout(PATIENCE_S):
        yield gateway, publisher
    task.cancel()


async def test_skips_superseded_tables() -> None:
    async with publishing() as (gateway, publisher):
        publisher.publish(table("a"))
        await asyncio.sleep(0)
        publisher.publish(table("b"))
        publisher.publish(table("c"))
        assert not publisher.is_settled
        gateway.gate.set()
        await publisher.applied()
        assert gateway.applied == ["a", "c"]
        assert publisher.is_settled


async def test_applies_an_unchanged_table_only_on_publish_again() -> None:
    async with publishing() as (gateway, publisher):
        gateway.gate.set()
        for _ in range(3):
            publisher.publish(table("a"))
            await publisher.applied()
        publisher.publish_again()
        await publisher.applied()
        assert gateway.applied == ["a", "a"]


async def test_retries_a_rejected_table() -> None:
    async with publishing() as (gateway, publisher):
        gateway.errors = 1
        gateway.gate.set()
        publisher.publish(table("a"))
        await publisher.applied()
        assert gateway.applied == ["a"]


async def test_an_unexpected_error_does_not_end_the_publishing_of_routes() -> None:
    async with publishing() as (gateway, publisher):
        gateway.errors = 1
        gateway.error = OSError(28, "no space left on device")
        gateway.gate.set()
        publisher.publish(table("a"))
        await publisher.applied()
        assert gateway.applied == ["a"]


async def test_reports_a_failure_that_lasts_until_routes_are_in_force() -> None:
    gateway, clock, told = Recorder(), Clock(), asyncio.Event()
    gateway.errors = 1_000_000
    publisher = RoutePublisher(gateway, told.set, Logger("test"), clock)
    task = asyncio.create_task(publisher.run())
    publisher.publish(table("a"))
    assert not publisher.is_late
    clock.now += 2 * LATE_AFTER_S
    assert (publisher.is_late, publisher.failure) == (True, "")
    gateway.gate.set()
    await asyncio.wait_for(told.wait(), PATIENCE_S)
    assert (publisher.is_late, publisher.failure) == (True, "")
    clock.now += FAILING_AFTER_S
    assert publisher.failure == "not now"
    publisher.publish(table("b"))  # the newer table is rejected, too
    assert publisher.failure == "not now"
    gateway.errors = 0
    await asyncio.wait_for(publisher.applied(), PATIENCE_S)
    assert (publisher.is_late, publisher.failure, gateway.applied) == (False, "", ["b"])
    task.cancel()
