"""Leader election between two processes: takeover, and fencing of the previous leader."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from cortex.errors import DatabaseAddressError
from cortex.operator.leader_election import Leadership
from cortex.state.database import open_state
from cortex.state.queries.key_values import KeyValueStore
from cortex.state.queries.leader_election import LeaderLock, LeaderRecord
from cortex.telemetry import Logger
from harness import HARNESS
from harness.installations.leading import FAST
from harness.servers.postgres import Postgres
from harness.servers.tcp_proxy import TcpProxy

pytestmark = pytest.mark.processes


class Candidate:
    """A process that competes for the leadership."""

    def __init__(self, url: str, name: str, *more: str) -> None:
        command = [sys.executable, str(HARNESS / "installations" / "leading.py"), url, name, *more]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environ, **pipes)
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        self.log: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_log, daemon=True).start()

    def expect(self, what: str) -> dict[str, Any]:
        told = self._told.get(timeout=60)
        assert told["what"] == what, told
        return told

    def expect_one_of(self, *whats: str) -> str:
        what: str = self._told.get(timeout=60)["what"]
        assert what in whats
        return what

    def leads(self) -> int:
        epoch: int = self.expect("leads")["epoch"]
        self.expect("ready")
        return epoch

    def write(self, name: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._told.put(json.loads(line))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.put(line.decode())


@contextmanager
def candidate(url: str, name: str, *more: str) -> Iterator[Candidate]:
    one = Candidate(url, name, *more)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def facts_of(url: str, *names: str) -> list[str | None]:
    engine = open_state(url)
    found = [KeyValueStore(engine).get(name) for name in names]
    engine.dispose()
    return found


def test_the_standby_takes_over_when_the_leader_dies(postgresql_url: str) -> None:
    with candidate(postgresql_url, "one") as one:
        first = one.leads()
        one.write("a")
        one.expect("written")
        with candidate(postgresql_url, "two") as two:
            line = two.log.get(timeout=60)
            assert "standing by: another operator leads" in line and "http://one" in line
            one.process.kill()
            assert two.leads() == first + 1
            two.write("b")
            two.expect("written")
            assert not any("standing by" in line for line in list(two.log.queue)), "told twice"
    assert facts_of(postgresql_url, "a", "b") == ["one", "two"]


def test_a_suspended_leader_is_fenced_and_notices_its_loss(postgresql_url: str) -> None:
    with candidate(postgresql_url, "one") as one, candidate(postgresql_url, "two") as two:
        leader, other = (one, two) if one.log.get(timeout=60).count("this operator leads") else (two, one)
        leader.leads()
        leader.process.send_signal(signal.SIGSTOP)
        other.leads()
        leader.write("late")
        leader.process.send_signal(signal.SIGCONT)
        assert {leader.expect_one_of("refused", "lost") for _ in range(2)} == {"refused", "lost"}
        other.write("b")
        other.expect("written")
    assert facts_of(postgresql_url, "late") == [None]


def test_a_leader_without_network_notices_its_loss_and_another_leads(postgres: Postgres, postgresql_url: str) -> None:
    with TcpProxy(postgres.port) as proxy:
        url = postgres.url(postgresql_url.rpartition("/")[2], proxy.port)
        with candidate(url, "one") as one:
            one.leads()
            with candidate(postgresql_url, "two") as two:
                proxy.fall_silent()
                one.expect("lost")
                two.leads()


def test_the_leadership_survives_a_broken_connection_and_a_server_restart() -> None:
    with Postgres() as server, TcpProxy(server.port) as proxy:
        url = server.url("postgres", proxy.port)
        with candidate(url, "one", "100") as one:
            one.leads()
            leader = who(server)
            for number, disturb in enumerate((proxy.break_all, partial(restart, server))):
                disturb()
                one.write(f"fact-{number}")
                while one.expect_one_of("written", "refused") == "refused":
                    one.write(f"fact-{number}")
            assert who(server) == leader
            with candidate(url, "two") as two:
                assert "standing by: another operator leads" in two.log.get(timeout=60)


def who(server: Postgres) -> LeaderRecord | None:
    seat = LeaderLock(server.url("postgres"))
    try:
        return seat.leader()
    finally:
        seat.release()


def restart(server: Postgres) -> None:
    server.stop("immediate")
    server.start()


async def test_a_released_leadership_is_acquired_at_once(postgresql_url: str) -> None:
    one, two = (
        Leadership(postgresql_url, LeaderRecord("host", n, f"http://{n}", "", time.time()), Logger("test"), FAST)
        for n in (1, 2)
    )
    assert await one.acquire() == 1
    waiting = asyncio.ensure_future(two.acquire())
    async with asyncio.timeout(30):
        while two.leader is None:
            await asyncio.sleep(0)
    assert two.leader.url == "http://1" and not waiting.done()
    assert not two.is_acquired
    await one.release()
    assert await waiting == 2
    assert two.leader is not None and two.leader.url == "http://2"
    assert two.is_acquired
    await two.release()


def test_rejects_a_wrong_database_address_at_once(postgresql_url: str) -> None:
    wrong = postgresql_url.replace("p%40ss", "other")
    leadership = Leadership(wrong, LeaderRecord("host", 1, "", "", 0.0), Logger("test"), FAST)
    with pytest.raises(DatabaseAddressError, match="password authentication failed") as raised:
        asyncio.run(leadership.acquire())
    assert raised.value.exit_code == 2 and "other" not in str(raised.value)
