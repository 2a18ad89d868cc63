"""Whether the operator that wrote its file is still there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil

from cortex.client.running import is_running, last_operator, read_operator
from cortex.home import Home
from wait import wait_until

OWN = psutil.Process()


def write(home: Home, **changes: object) -> None:
    data = {"pid": OWN.pid, "create_time": OWN.create_time(), "url": "http://a:1/", "gateway_url": "http://a:2"}
    (home.run_dir / "operator.json").write_text(json.dumps({**data, **changes}))


def test_this_very_process_is_running() -> None:
    assert is_running(OWN.pid, OWN.create_time())


def test_a_number_that_another_process_has_now_is_not_the_operator(home: Home) -> None:
    write(home, create_time=OWN.create_time() - 60)

    assert read_operator(home) is None
    assert last_operator(home) is not None


def test_a_process_that_ended_is_not_running_even_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    created = psutil.Process(child.pid).create_time()
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)

    assert not is_running(child.pid, created)
    child.wait()
    assert not is_running(child.pid, created)


def test_the_file_of_a_living_operator_is_read(home: Home) -> None:
    write(home)

    operator = read_operator(home)

    assert operator is not None
    assert (operator.pid, operator.url) == (os.getpid(), "http://a:1")


def test_no_file_and_a_torn_one_mean_no_operator(home: Home) -> None:
    assert last_operator(home) is None
    for text in ("", "{", "[]", '{"pid": "x"}'):
        (home.run_dir / "operator.json").write_text(text)
        assert last_operator(home) is None
