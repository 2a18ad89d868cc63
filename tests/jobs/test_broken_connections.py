"""Connections to PostgreSQL break at every moment of a transaction: each operation happens once, or is said to fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from cortex.errors import DatabaseUnavailableError
from cortex.jobs.writer import TransactionThread
from cortex.state.database import open_jobs
from harness.servers.postgres import Postgres
from harness.servers.tcp_proxy import ProxyAction, TcpProxy
from harness.wait import wait_until


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[TcpProxy]:
    with TcpProxy(postgres.port) as proxy:
        yield proxy


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


def use(url: str, work: Callable[[TransactionThread], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = open_jobs(url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE numbers (n INTEGER)"))
        writer = TransactionThread(engine, "test-writer")
        writer.startup()
        try:
            await work(writer)
        finally:
            await writer.shutdown()
            engine.dispose()

    asyncio.run(run())


def put(number: int, before: Callable[[], None] = lambda: None) -> Callable[[Connection], int]:
    def work(connection: Connection) -> int:
        connection.execute(text("INSERT INTO numbers VALUES (:n)"), {"n": number})
        before()
        return number

    return work


def numbers(connection: Connection) -> list[int]:
    return list(connection.execute(text("SELECT n FROM numbers ORDER BY n")).scalars())


def once(action: ProxyAction, what: bytes) -> Callable[[bytes], ProxyAction]:
    """Do something to the first message that contains `what`."""
    left = threading.Semaphore(1)
    return lambda data: action if what in data and left.acquire(blocking=False) else ProxyAction.PASS


@pytest.mark.parametrize("action", [ProxyAction.CUT, ProxyAction.CUT_ANSWER])
@pytest.mark.parametrize("moment", [b"BEGIN", b"UPDATE fence", b"SAVEPOINT", b"INSERT INTO numbers", b"COMMIT"])
def test_a_connection_that_breaks_at_any_moment_costs_nothing(
    postgresql_url: str, postgres: Postgres, proxy: TcpProxy, moment: bytes, action: ProxyAction
) -> None:
    async def work(writer: TransactionThread) -> None:
        assert await writer.run(put(0)) == 0
        proxy.judge = once(action, moment)
        together = (writer.run(put(number)) for number in range(1, 5))
        assert await asyncio.gather(*together) == [1, 2, 3, 4]
        assert await writer.run(numbers) == [0, 1, 2, 3, 4]

    use(postgres.url(postgresql_url.rpartition("/")[2], proxy.port), work)


def test_a_server_that_is_stopped_and_started_again_costs_nothing(own_server: Postgres) -> None:
    async def work(writer: TransactionThread) -> None:
        for number, mode in enumerate(("fast", "immediate")):
            own_server.stop(mode)
            waiting = asyncio.ensure_future(writer.run(put(number)))
            await asyncio.to_thread(own_server.start)
            assert await waiting == number
        assert await writer.run(numbers) == [0, 1]

    use(own_server.url("postgres"), work)


def test_a_server_killed_within_a_transaction_costs_nothing(own_server: Postgres) -> None:
    async def work(writer: TransactionThread) -> None:
        killings = iter([own_server.kill])

        def kill_once() -> None:
            for kill in killings:
                kill()

        waiting = asyncio.ensure_future(writer.run(put(1, kill_once)))
        await asyncio.to_thread(wait_until, lambda: not Path(f"/proc/{pid}").exists())
        await asyncio.to_thread(own_server.start)
        assert await waiting == 1
        assert await writer.run(numbers) == [1]

    pid = own_server.pid
    use(own_server.url("postgres"), work)


def test_operations_fail_after_a_while_and_then_at_once_while_a_server_is_unreachable(own_server: Postgres) -> None:
    async def work(writer: TransactionThread) -> None:
        assert await writer.run(put(1)) == 1
        own_server.stop()
        for _ in range(3):
            with pytest.raises(DatabaseUnavailableError, match="can't be reached") as raised:
                await writer.run(put(2))
            assert own_server.password not in str(raised.value)
        await asyncio.to_thread(own_server.start)
        await _until_back(writer, put(3))
        assert await writer.run(numbers) == [1, 3]

    use(own_server.url("postgres"), work)


async def _until_back(writer: TransactionThread, work: Callable[[Connection], Any]) -> None:
    while True:
        try:
            await writer.run(work)
            return
        except DatabaseUnavailableError:
            pass
