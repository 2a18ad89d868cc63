from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import psutil
import pytest

from cortex.processes.identity import Identity
from cortex.processes.session import kill_session
from harness.wait import wait_until


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True)


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


def test_a_session_is_known_by_when_its_leader_began_and_not_by_the_clock(sleeper: subprocess.Popen[bytes]) -> None:
    identity = Identity.of(sleeper.pid)
    kill_session(replace(identity, boot_id="another boot"))
    assert sleeper.poll() is None
    kill_session(replace(identity, created_at=identity.created_at + 3600))
    assert sleeper.wait() != 0
    wait_until(lambda: not members(sleeper.pid))


def test_a_session_that_got_the_number_of_an_ended_one_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    stranger = Identity.of(sleeper.pid)
    kill_session(replace(stranger, start_ticks=1))
    try:
        assert sleeper.poll() is None
    finally:
        kill_session(stranger)
        sleeper.wait()
