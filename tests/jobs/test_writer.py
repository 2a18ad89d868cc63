from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import Connection, event, text

from cortex.errors import DatabaseUnavailableError
from cortex.jobs.writer import MAX_GROUP, TransactionThread
from cortex.state.database import Where, open_jobs

T = TypeVar("T")


def with_writer(where: Where, use: Callable[[TransactionThread, list[str]], Awaitable[T]]) -> T:
    """Run `use` with a writer and the list of what becomes of its transactions."""

    async def run() -> T:
        engine = open_jobs(where)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE numbers (n INTEGER PRIMARY KEY)"))
        ends: list[str] = []
        event.listen(engine, "commit", lambda connection: ends.append("commit"))
        event.listen(engine, "rollback", lambda connection: ends.append("rollback"))
        writer = TransactionThread(engine, "test-writer")
        writer.startup()
        try:
            return await use(writer, ends)
        finally:
            await writer.shutdown()
            engine.dispose()

    return asyncio.run(run())


def put(number: int) -> Callable[[Connection], int]:
    def work(connection: Connection) -> int:
        connection.execute(text("INSERT INTO numbers VALUES (:n)"), {"n": number})
        return number

    return work


def numbers(connection: Connection) -> list[int]:
    return list(connection.execute(text("SELECT n FROM numbers ORDER BY n")).scalars())


class Gate:
    """An operation that holds the writer until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, connection: Connection) -> None:
        self.entered.set()
        assert self.opened.wait(10)


async def behind_a_gate(writer: TransactionThread, works: list[Callable[[Connection], T]]) -> list[T | BaseException]:
    """Have operations wait together, then let them go."""
    gate = Gate()
    first = asyncio.ensure_future(writer.run(gate))
    await asyncio.to_thread(gate.entered.wait)
    waiting = [asyncio.ensure_future(writer.run(work)) for work in works]
    await asyncio.sleep(0)
    gate.opened.set()
    await first
    return await asyncio.gather(*waiting, return_exceptions=True)


def test_what_waits_together_is_one_transaction_in_its_order(where: Where) -> None:
    async def use(writer: TransactionThread, ends: list[str]) -> None:
        order: list[int] = []

        def note(number: int) -> Callable[[Connection], None]:
            return lambda connection: order.append(number)

        await behind_a_gate(writer, [note(number) for number in range(20)])
        assert order == list(range(20))
        assert ends == ["commit", "commit"]

    with_writer(where, use)


def test_no_group_is_larger_than_the_limit(where: Where) -> None:
    async def use(writer: TransactionThread, ends: list[str]) -> None:
        assert await behind_a_gate(writer, [put(number) for number in range(MAX_GROUP + 1)]) == list(
            range(MAX_GROUP + 1)
        )
        assert len(ends) == 3

    with_writer(where, use)


def test_an_operation_that_raises_is_rolled_back_without_an_effect_on_others(where: Where) -> None:
    async def use(writer: TransactionThread, ends: list[str]) -> None:
        def broken(connection: Connection) -> int:
            put(100)(connection)
            raise ValueError("broken")

        outcomes = await behind_a_gate(writer, [put(1), broken, put(2), put(1), put(3)])
        assert [type(outcome).__name__ for outcome in outcomes] == ["int", "ValueError", "int", "IntegrityError", "int"]
        assert await writer.run(numbers) == [1, 2, 3]

    with_writer(where, use)


def test_a_transaction_that_can_not_be_committed_fails_all_of_its_operations(where: Where) -> None:
    async def use(writer: TransactionThread, ends: list[str]) -> None:
        def give_up(connection: Connection) -> None:
            connection.exec_driver_sql("ROLLBACK")  # what SQLite does by itself when the disk is full

        outcomes = await behind_a_gate(writer, [put(1), give_up, put(2)])
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        assert await writer.run(numbers) == []
        assert await writer.run(put(5)) == 5

    with_writer(where, use)


def test_an_operation_cancelled_before_it_began_is_left_out(where: Where) -> None:
    async def use(writer: TransactionThread, ends: list[str]) -> None:
        gate = Gate()
        first = asyncio.ensure_future(writer.run(gate))
        await asyncio.to_thread(gate.entered.wait)
        cancelled, kept = (asyncio.ensure_future(writer.run(put(number))) for number in (1, 2))
        await asyncio.sleep(0)
        cancelled.cancel()
        gate.opened.set()
        await asyncio.gather(first, kept)
        assert await writer.run(numbers) == [2]

    with_writer(where, use)


def test_shutdown_finishes_what_waits_and_takes_nothing_more(where: Where) -> None:
    async def use(writer: TransactionThread, ends: list[str]) -> None:
        gate = Gate()
        first = asyncio.ensure_future(writer.run(gate))
        await asyncio.to_thread(gate.entered.wait)
        waiting = [asyncio.ensure_future(writer.run(put(number))) for number in range(5)]
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(writer.shutdown())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="is not running"):
            await writer.run(put(9))
        gate.opened.set()
        await ending
        assert await asyncio.gather(*waiting) == list(range(5))
        await first
        await writer.shutdown()

    with_writer(where, use)


def test_many_callers_at_once_each_get_their_own_answer(where: Where) -> None:
    async def use(writer: TransactionThread, ends: list[str]) -> None:
        async def caller(base: int) -> list[int]:
            return [await writer.run(put(base + step)) for step in range(20)]

        found = await asyncio.gather(*(caller(base) for base in range(0, 2000, 100)))
        assert found == [[base + step for step in range(20)] for base in range(0, 2000, 100)]
        assert len(await writer.run(numbers)) == 400
        assert len(ends) < 100  # of 400 operations

    with_writer(where, use)


def test_a_full_disk_is_reported_as_a_transient_error(tmp_path: Path) -> None:
    async def use(writer: TransactionThread, ends: list[str]) -> None:
        pages: int = await writer.run(lambda connection: connection.execute(text("PRAGMA page_count")).scalar_one())
        await writer.run(lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}").close())
        large = text("CREATE TABLE large AS SELECT zeroblob(1000000) AS bytes")
        with pytest.raises(DatabaseUnavailableError, match="database or disk is full"):
            await writer.run(lambda connection: connection.execute(large).close())
        await writer.run(lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 100000").close())
        assert await writer.run(put(1)) == 1

    with_writer(tmp_path / "jobs.db", use)
