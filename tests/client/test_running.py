"""The local operator: its identity from its file, and why it did not start."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cortex.client.local_operator import ListenOptions, start, successor_environ
from cortex.errors import OperatorUnavailableError
from cortex.home import Home
from cortex.installation import last_operator, read_operator
from cortex.processes.identity import Identity

OWN = Identity.of(os.getpid())
URLS = {"url": "http://a:1/", "gateway_url": "http://a:2"}


def write(home: Home, **changes: object) -> None:
    (home.run_dir / "operator.json").write_text(json.dumps({**OWN.as_json(), **URLS, **changes}))


def test_a_reused_pid_is_not_the_operator(home: Home) -> None:
    write(home, start_ticks=1)

    assert read_operator(home) is None
    assert last_operator(home) is not None


def test_the_file_of_a_running_operator_is_read(home: Home) -> None:
    write(home)

    operator = read_operator(home)

    assert operator is not None
    assert (operator.pid, operator.url) == (os.getpid(), "http://a:1")


def test_a_change_of_the_clock_does_not_hide_the_operator(home: Home) -> None:
    write(home, created_at=OWN.created_at - 3600)

    assert read_operator(home) is not None


def test_the_operator_of_an_older_version_is_recognized(home: Home) -> None:
    data = {"pid": OWN.pid, "create_time": psutil.Process().create_time()}
    (home.run_dir / "operator.json").write_text(json.dumps({**data, **URLS}))

    assert read_operator(home) is not None


def test_a_missing_or_truncated_file_means_no_operator(home: Home) -> None:
    assert last_operator(home) is None
    for text in ("", "{", "[]", '{"pid": "x"}'):
        (home.run_dir / "operator.json").write_text(text)
        assert last_operator(home) is None


@dataclass(frozen=True)
class Failing(ListenOptions):
    """An operator that ends at once, without a word in its log."""

    def command(self, home: Home) -> list[str]:
        return ["false"]


@pytest.mark.processes
def test_a_failed_start_names_the_log_or_a_full_disk(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperatorUnavailableError, match=r"exit code 1.*operator.log may contain the reason"):
        start(home, Failing())

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    with pytest.raises(OperatorUnavailableError, match=rf"the disk of CORTEX_HOME={home.path} is full"):
        start(home, Failing())


def test_a_successor_gets_the_environment_of_the_old_operator_with_the_own_python() -> None:
    bin_folder = Path(sys.executable).parent
    old = {"PATH": "/old/bin:/usr/bin", "VIRTUAL_ENV": "/old", "AWS_PROFILE": "shop"}
    expected = {"PATH": f"{bin_folder}:/usr/bin", "VIRTUAL_ENV": sys.prefix, "AWS_PROFILE": "shop"}
    assert successor_environ(old, "/old/bin/python") == expected
    assert successor_environ({"PATH": "/usr/bin"}, "/old/bin/python") == {"PATH": "/usr/bin"}
    assert successor_environ({}, "/old/bin/python") == {}
