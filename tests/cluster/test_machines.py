from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import TESTS
from harness.cluster.machines import Machine, network, require_machines, wait_for_port
from harness.wait import wait_until

pytestmark = pytest.mark.processes

PING = """
import socket, sys
socket.create_connection((sys.argv[1], 8000), 1).close()
"""
#: Makes a network with a machine, says so, and waits to be killed.
OWNER = """
import sys, time
from pathlib import Path
from harness.cluster.machines import network
with network() as made:
    made.add("one", Path(sys.argv[1])).start()
    print(made.bridge, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    require_machines()
    with network() as made:
        machines = made.add("one", tmp_path / "1"), made.add("two", tmp_path / "2")
        for machine in machines:
            machine.start()
        yield machines


def serve(machine: Machine) -> None:
    subprocess.Popen(machine.command([sys.executable, "-m", "http.server", "8000"]), stderr=subprocess.DEVNULL)
    wait_for_port(machine.host, 8000)


def reaches(here: Machine, there: Machine) -> bool:
    return here.run([sys.executable, "-c", PING, there.host], check=False).returncode == 0


def links() -> set[str]:
    shown = subprocess.run(["ip", "-json", "link"], check=True, capture_output=True).stdout
    return {link["ifname"] for link in json.loads(shown)}


def test_machines_reach_each_other_unless_they_are_cut_off(two: tuple[Machine, Machine]) -> None:
    one, other = two
    serve(one)
    assert reaches(other, one)
    one.partition()
    assert not reaches(other, one)
    one.heal()
    wait_until(lambda: reaches(other, one))


def test_a_killed_machine_can_be_restarted(two: tuple[Machine, Machine]) -> None:
    one, other = two
    serve(one)
    one.kill()
    assert not reaches(other, one)
    one.start()
    serve(one)
    wait_until(lambda: reaches(other, one))


def test_leftovers_of_a_killed_test_run_are_removed(tmp_path: Path) -> None:
    require_machines()
    paths = str(Path(__file__).parent), str(TESTS)
    code = f"import sys; sys.path[:0] = {paths}{OWNER}"
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    bridge = owner.stdout.readline().strip()
    assert bridge in links()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    with network():
        assert not [name for name in links() if name[3:].startswith(bridge[3:])]
