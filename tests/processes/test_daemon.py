from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cortex.processes.daemon import Daemon, kill_session, output_tail
from cortex.processes.identity import Identity
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SLEEP = ["sh", "-c", "echo started; sleep 1000 & sleep 1000"]


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "daemon.json")
    with (tmp_path / "output").open("wb") as output:
        daemon.start(SLEEP, output=output)
    yield daemon
    daemon.kill()
    wait_until(lambda: not daemon.is_alive())


def members(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except (OSError, psutil.Error):
            continue
    return found


def test_a_whole_session_is_killed_even_after_its_leader_died(sleeper: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(members(sleeper.pid)) >= 2)
    leader = Identity.of(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    kill_session(leader)
    wait_until(lambda: not members(sleeper.pid))


def test_a_session_is_identified_by_the_start_of_its_leader_and_not_by_the_clock(
    sleeper: subprocess.Popen[bytes],
) -> None:
    identity = Identity.of(sleeper.pid)
    kill_session(replace(identity, boot_id="another boot"))
    assert sleeper.poll() is None
    kill_session(replace(identity, created_at=identity.created_at + 3600))
    assert sleeper.wait() != 0
    wait_until(lambda: not members(sleeper.pid))


def test_a_session_that_reuses_the_id_of_an_ended_one_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    stranger = Identity.of(sleeper.pid)
    kill_session(replace(stranger, start_ticks=1))
    try:
        assert sleeper.poll() is None
    finally:
        kill_session(stranger)
        sleeper.wait()


def test_a_daemon_leads_its_own_session_and_its_output_is_kept(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.pid is not None
    assert os.getsid(daemon.pid) == daemon.pid
    assert wait_until(lambda: output_tail(tmp_path / "output")) == "started"


def test_a_running_daemon_is_adopted_by_its_identity_file(daemon: Daemon, tmp_path: Path) -> None:
    adopter = Daemon(tmp_path / "daemon.json")

    assert adopter.adopt()
    assert adopter.pid == daemon.pid
    assert adopter.is_alive()


def test_a_daemon_that_ended_is_not_adopted(daemon: Daemon, tmp_path: Path) -> None:
    daemon.kill()
    wait_until(lambda: not daemon.is_alive())

    assert not Daemon(tmp_path / "daemon.json").adopt()


def test_nothing_is_adopted_without_an_identity_file(daemon: Daemon, tmp_path: Path) -> None:
    recorded = daemon.identity
    daemon.forget()

    assert not Daemon(tmp_path / "daemon.json").adopt()
    assert daemon.pid is None
    assert recorded is not None
    daemon.record(recorded)


def test_output_of_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert output_tail(tmp_path / "output") == ""
