"""Transactions of the writer thread: grouping, failures, cancellation and shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import Connection, text

from cortex.errors import DatabaseUnavailableError
from cortex.jobs.writer import MAX_GROUP, TransactionThread
from cortex.state.database import Where
from harness.jobs.writers import insert, read_numbers, run_with_writer

T = TypeVar("T")


class Gate:
    """An operation that blocks the writer until the gate is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, connection: Connection) -> None:
        self.entered.set()
        assert self.opened.wait(10)


async def run_queued(writer: TransactionThread, works: list[Callable[[Connection], T]]) -> list[T | BaseException]:
    """Queue operations while the writer is blocked, then release it."""
    gate = Gate()
    first = asyncio.ensure_future(writer.run(gate))
    await asyncio.to_thread(gate.entered.wait)
    waiting = [asyncio.ensure_future(writer.run(work)) for work in works]
    await asyncio.sleep(0)
    gate.opened.set()
    await first
    return await asyncio.gather(*waiting, return_exceptions=True)


def test_queued_operations_run_in_order_in_one_transaction(where: Where) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        order: list[int] = []

        def append(number: int) -> Callable[[Connection], None]:
            return lambda connection: order.append(number)

        await run_queued(writer, [append(number) for number in range(20)])
        assert order == list(range(20))
        assert ends == ["commit", "commit"]

    run_with_writer(where, scenario)


def test_a_transaction_has_at_most_the_maximum_number_of_operations(where: Where) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        assert await run_queued(writer, [insert(number) for number in range(MAX_GROUP + 1)]) == list(
            range(MAX_GROUP + 1)
        )
        assert len(ends) == 3

    run_with_writer(where, scenario)


def test_an_operation_that_raises_is_rolled_back_alone(where: Where) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        def broken(connection: Connection) -> int:
            insert(100)(connection)
            raise ValueError("broken")

        outcomes = await run_queued(writer, [insert(1), broken, insert(2), insert(1), insert(3)])
        assert [type(outcome).__name__ for outcome in outcomes] == ["int", "ValueError", "int", "IntegrityError", "int"]
        assert await writer.run(read_numbers) == [1, 2, 3]

    run_with_writer(where, scenario)


def test_a_failed_commit_fails_all_operations_of_its_transaction(where: Where) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        def roll_back(connection: Connection) -> None:
            connection.exec_driver_sql("ROLLBACK")  # as SQLite does when the disk is full

        outcomes = await run_queued(writer, [insert(1), roll_back, insert(2)])
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        assert await writer.run(read_numbers) == []
        assert await writer.run(insert(5)) == 5

    run_with_writer(where, scenario)


def test_an_operation_cancelled_before_its_start_is_not_run(where: Where) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        gate = Gate()
        first = asyncio.ensure_future(writer.run(gate))
        await asyncio.to_thread(gate.entered.wait)
        cancelled, kept = (asyncio.ensure_future(writer.run(insert(number))) for number in (1, 2))
        await asyncio.sleep(0)
        cancelled.cancel()
        gate.opened.set()
        await asyncio.gather(first, kept)
        assert await writer.run(read_numbers) == [2]

    run_with_writer(where, scenario)


def test_shutdown_finishes_queued_operations_and_rejects_new_ones(where: Where) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        gate = Gate()
        first = asyncio.ensure_future(writer.run(gate))
        await asyncio.to_thread(gate.entered.wait)
        waiting = [asyncio.ensure_future(writer.run(insert(number))) for number in range(5)]
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(writer.shutdown())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="is not running"):
            await writer.run(insert(9))
        gate.opened.set()
        await ending
        assert await asyncio.gather(*waiting) == list(range(5))
        await first
        await writer.shutdown()

    run_with_writer(where, scenario)


def test_concurrent_callers_get_their_own_results(where: Where) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        async def caller(base: int) -> list[int]:
            return [await writer.run(insert(base + step)) for step in range(20)]

        found = await asyncio.gather(*(caller(base) for base in range(0, 2000, 100)))
        assert found == [[base + step for step in range(20)] for base in range(0, 2000, 100)]
        assert len(await writer.run(read_numbers)) == 400
        assert len(ends) < 100  # of 400 operations

    run_with_writer(where, scenario)


def test_a_full_disk_is_reported_as_a_transient_error(tmp_path: Path) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        pages: int = await writer.run(lambda connection: connection.execute(text("PRAGMA page_count")).scalar_one())
        await writer.run(lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}").close())
        large = text("CREATE TABLE large AS SELECT zeroblob(1000000) AS bytes")
        with pytest.raises(DatabaseUnavailableError, match="database or disk is full"):
            await writer.run(lambda connection: connection.execute(large).close())
        await writer.run(lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 100000").close())
        assert await writer.run(insert(1)) == 1

    run_with_writer(tmp_path / "jobs.db", scenario)
