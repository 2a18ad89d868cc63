"""A process is known again by what no setting of the clock changes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cortex.processes.identity import Identity
from harness.wait import wait_until

pytestmark = pytest.mark.processes

OWN = Identity.of(os.getpid())


def test_a_process_is_the_same_when_the_clock_was_set_since() -> None:
    set_since = replace(OWN, created_at=OWN.created_at - 3600)

    assert set_since.is_alive()
    assert set_since.is_same(OWN)
    assert not set_since.began_before(OWN)


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another boot"}, {"pid": 2**22 + 1}])
def test_another_process_is_another(change: dict[str, object]) -> None:
    other = replace(OWN, **change)  # type: ignore[arg-type]

    assert not other.is_alive()
    assert not other.is_same(OWN)


def test_where_no_ticks_are_known_the_clock_tells() -> None:
    by_clock = replace(OWN, start_ticks=None)

    assert by_clock.is_alive()
    assert not replace(by_clock, created_at=OWN.created_at - 100).is_alive()
    assert replace(by_clock, created_at=OWN.created_at - 100).began_before(by_clock)
    assert not by_clock.began_before(by_clock)


def test_what_psutil_says_of_the_start_is_what_files_of_old_versions_hold() -> None:
    assert abs(psutil.Process().create_time() - OWN.created_at) < 1


@pytest.mark.parametrize("name", ["create_time", "created_at"])
def test_a_file_of_an_older_version_is_understood_and_then_outlasts_the_clock(tmp_path: Path, name: str) -> None:
    file = tmp_path / "process.json"
    file.write_text(json.dumps({"pid": OWN.pid, name: psutil.Process().create_time()}))

    assert Identity.read(file) == OWN


def test_a_file_of_an_older_version_about_a_process_that_ended_names_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "process.json"
    file.write_text(json.dumps({"pid": OWN.pid, "created_at": OWN.created_at - 60, "boot_id": OWN.boot_id}))

    told = Identity.read(file)

    assert told is not None
    assert not told.is_alive()


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", '{"pid": "x", "created_at": 1}', '{"pid": 1}'])
def test_a_torn_file_names_nobody(tmp_path: Path, text: str) -> None:
    file = tmp_path / "process.json"
    file.write_text(text)

    assert Identity.read(file) is None


def test_a_process_that_ended_is_not_alive_even_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = Identity.of(child.pid)
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)

    assert not identity.is_alive()
    child.wait()
    assert not identity.is_alive()
    with pytest.raises(ProcessLookupError):
        Identity.of(2**22 + 1)


def test_a_process_that_a_signal_has_stopped_is_alive_and_stopped() -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = Identity.of(child.pid)
    try:
        assert not identity.is_stopped()
        child.send_signal(signal.SIGSTOP)
        wait_until(identity.is_stopped)

        assert identity.is_alive()
        assert not replace(identity, start_ticks=1).is_stopped()  # a later process with the same id
    finally:
        child.kill()
        child.wait()
    assert not identity.is_stopped()


def test_a_process_is_alive_though_no_descriptor_is_free_to_inspect_it() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        is_alive, is_ended_alive = OWN.is_alive(), replace(OWN, pid=2**22 + 1).is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (is_alive, is_ended_alive) == (True, False)
