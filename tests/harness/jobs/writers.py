"""A writer thread on a job database with a table of numbers, and operations on that table."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sqlalchemy import Connection, event, text

from cortex.jobs.writer import TransactionThread
from cortex.state.database import Where, open_jobs


def run_with_writer(where: Where, scenario: Callable[[TransactionThread, list[str]], Awaitable[None]]) -> None:
    """Run a scenario with a writer and the list of its commits and rollbacks."""

    async def run() -> None:
        engine = open_jobs(where)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE numbers (n INTEGER PRIMARY KEY)"))
        ends: list[str] = []
        event.listen(engine, "commit", lambda connection: ends.append("commit"))
        event.listen(engine, "rollback", lambda connection: ends.append("rollback"))
        writer = TransactionThread(engine, "test-writer")
        writer.startup()
        try:
            await scenario(writer, ends)
        finally:
            await writer.shutdown()
            engine.dispose()

    asyncio.run(run())


def insert(number: int, before_return: Callable[[], None] = lambda: None) -> Callable[[Connection], int]:
    """Return an operation that inserts a number and returns it."""

    def work(connection: Connection) -> int:
        connection.execute(text("INSERT INTO numbers VALUES (:n)"), {"n": number})
        before_return()
        return number

    return work


def read_numbers(connection: Connection) -> list[int]:
    return list(connection.execute(text("SELECT n FROM numbers ORDER BY n")).scalars())
