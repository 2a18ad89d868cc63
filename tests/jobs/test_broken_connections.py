"""Connections to PostgreSQL break within a transaction: each operation is done once, or fails with an error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from cortex.errors import DatabaseUnavailableError
from cortex.jobs.writer import TransactionThread
from harness.jobs.writers import insert, read_numbers, run_with_writer
from harness.servers.postgres import Postgres
from harness.servers.tcp_proxy import ProxyAction, TcpProxy
from harness.wait import PATIENCE_S

pytestmark = pytest.mark.processes


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[TcpProxy]:
    with TcpProxy(postgres.port) as proxy:
        yield proxy


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat transactions for longer than a server takes to start on a loaded machine."""
    monkeypatch.setattr("cortex.jobs.writer.PATIENCE_S", PATIENCE_S)


def once(action: ProxyAction, content: bytes) -> Callable[[bytes], ProxyAction]:
    """Apply `action` to the first message that contains `content`."""
    remaining = threading.Semaphore(1)
    return lambda data: action if content in data and remaining.acquire(blocking=False) else ProxyAction.PASS


@pytest.mark.parametrize("action", [ProxyAction.CUT, ProxyAction.CUT_ANSWER])
@pytest.mark.parametrize("moment", [b"BEGIN", b"UPDATE fence", b"SAVEPOINT", b"INSERT INTO numbers", b"COMMIT"])
def test_operations_survive_a_connection_that_breaks_at_any_point(
    postgresql_url: str, postgres: Postgres, proxy: TcpProxy, moment: bytes, action: ProxyAction
) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        assert await writer.run(insert(0)) == 0
        proxy.judge = once(action, moment)
        together = (writer.run(insert(number)) for number in range(1, 5))
        assert await asyncio.gather(*together) == [1, 2, 3, 4]
        assert await writer.run(read_numbers) == [0, 1, 2, 3, 4]

    run_with_writer(postgres.url(postgresql_url.rpartition("/")[2], proxy.port), scenario)


@pytest.mark.usefixtures("_patient")
def test_operations_survive_a_server_restart(own_server: Postgres) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        for number, mode in enumerate(("fast", "immediate")):
            own_server.stop(mode)
            waiting = asyncio.ensure_future(writer.run(insert(number)))
            await asyncio.to_thread(own_server.start)
            assert await waiting == number
        assert await writer.run(read_numbers) == [0, 1]

    run_with_writer(own_server.url("postgres"), scenario)


@pytest.mark.usefixtures("_patient")
def test_operations_survive_a_server_killed_within_a_transaction(own_server: Postgres) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        killings, is_dead = iter([own_server.kill]), threading.Event()

        def kill_once() -> None:
            for kill in killings:
                kill()
                is_dead.set()

        waiting = asyncio.ensure_future(writer.run(insert(1, kill_once)))
        assert await asyncio.to_thread(is_dead.wait, PATIENCE_S)  # all processes: another server can't start before
        await asyncio.to_thread(own_server.start)
        assert await waiting == 1
        assert await writer.run(read_numbers) == [1]

    run_with_writer(own_server.url("postgres"), scenario)


def test_operations_fail_while_a_server_is_unreachable(own_server: Postgres) -> None:
    async def scenario(writer: TransactionThread, ends: list[str]) -> None:
        assert await writer.run(insert(1)) == 1
        own_server.stop()
        for _ in range(3):
            with pytest.raises(DatabaseUnavailableError, match="can't be reached") as raised:
                await writer.run(insert(2))
            assert own_server.password not in str(raised.value)
        await asyncio.to_thread(own_server.start)
        await _until_back(writer, insert(3))
        assert await writer.run(read_numbers) == [1, 3]

    run_with_writer(own_server.url("postgres"), scenario)


async def _until_back(writer: TransactionThread, work: Callable[[Connection], Any]) -> None:
    while True:
        try:
            await writer.run(work)
            return
        except DatabaseUnavailableError:
            pass
