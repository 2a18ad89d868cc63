from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cortex.engine.session import Identity, kill_session
from wait import wait_until


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


def test_an_identity_is_that_of_one_process_only(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    identity = Identity.of(sleeper.pid)
    try:
        (tmp_path / "file").write_text(identity.to_json())
        assert Identity.read(tmp_path / "file") == identity
        assert identity.is_alive()
        assert not replace(identity, created_at=identity.created_at - 100).is_alive()
        assert not replace(identity, boot_id="another boot").is_alive()
        kill_session(replace(identity, boot_id="another boot"))
        assert sleeper.poll() is None
    finally:
        kill_session(identity)
        wait_until(lambda: not identity.is_alive())
        sleeper.wait()


def test_a_session_that_got_the_number_of_an_ended_one_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    stranger = Identity.of(sleeper.pid)
    kill_session(replace(stranger, created_at=stranger.created_at - 100))
    try:
        assert sleeper.poll() is None
    finally:
        kill_session(stranger)
        sleeper.wait()


def test_a_process_that_does_not_run_has_no_identity(tmp_path: Path) -> None:
    assert Identity.read(tmp_path / "none") is None
    with pytest.raises(ProcessLookupError):
        Identity.of(2**22 + 1)
