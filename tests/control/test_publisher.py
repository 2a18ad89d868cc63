from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from cortex.control.publisher import RoutePublisher
from cortex.errors import GatewayError
from cortex.gateway.routes import Backend, RoutingTable
from cortex.telemetry import Logger


def table(name: str) -> RoutingTable:
    return RoutingTable((Backend(name, f"/{name}", 60, 1, 1, "starting"),))


class Recorder:
    """A gateway that takes tables when the test lets it."""

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


def run(test: Callable[[Recorder, RoutePublisher], Awaitable[None]]) -> None:
    async def scenario() -> None:
        gateway = Recorder()
        publisher = RoutePublisher(gateway, lambda: None, Logger("test"))
        task = asyncio.create_task(publisher.run())
        await asyncio.wait_for(test(gateway, publisher), 10)
        task.cancel()

    asyncio.run(scenario())


def test_tables_that_are_overtaken_are_skipped() -> None:
    async def scenario(gateway: Recorder, publisher: RoutePublisher) -> None:
        publisher.publish(table("a"))
        await asyncio.sleep(0)
        publisher.publish(table("b"))
        publisher.publish(table("c"))
        assert not publisher.is_settled
        gateway.gate.set()
        await publisher.applied()
        assert gateway.applied == ["a", "c"]
        assert publisher.is_settled

    run(scenario)


def test_the_same_table_is_applied_once_unless_it_may_be_lost() -> None:
    async def scenario(gateway: Recorder, publisher: RoutePublisher) -> None:
        gateway.gate.set()
        for _ in range(3):
            publisher.publish(table("a"))
            await publisher.applied()
        publisher.publish_again()
        await publisher.applied()
        assert gateway.applied == ["a", "a"]

    run(scenario)


def test_a_table_that_is_refused_is_tried_again() -> None:
    async def scenario(gateway: Recorder, publisher: RoutePublisher) -> None:
        gateway.errors = 1
        gateway.gate.set()
        publisher.publish(table("a"))
        await publisher.applied()
        assert gateway.applied == ["a"]

    run(scenario)


def test_an_unexpected_error_does_not_end_the_publishing_of_routes() -> None:
    async def scenario(gateway: Recorder, publisher: RoutePublisher) -> None:
        gateway.errors = 1
        gateway.error = OSError(28, "no space left on device")
        gateway.gate.set()
        publisher.publish(table("a"))
        await publisher.applied()
        assert gateway.applied == ["a"]

    run(scenario)
