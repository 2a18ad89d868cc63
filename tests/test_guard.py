"""A test run that is killed leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.guard import VARIABLE
from harness.wait import has_ended, wait_until

pytestmark = pytest.mark.processes

#: A daemon, the child of a daemon without variables, and an orphan HAProxy without variables in the daemon's home.
RUN = """
import os, subprocess, sys, time
from pathlib import Path
from harness.guard import start_guard

home, pids = Path(sys.argv[1]), Path(sys.argv[2])
start_guard()
code = '''
import os, shutil, subprocess
shutil.copy(shutil.which("sleep"), {home!r} + "/haproxy")
child = subprocess.Popen(["sleep", "600"], env={{}})
orphan = subprocess.check_output(["sh", "-c", "./haproxy 600 >/dev/null & echo $!"], cwd={home!r}, env={{}})
print(os.getpid(), child.pid, int(orphan), flush=True)
child.wait()
'''
daemon = subprocess.Popen(
    [sys.executable, "-c", code.format(home=str(home))],
    env=os.environ | {"CORTEX_HOME": str(home)}, stdout=subprocess.PIPE, start_new_session=True,
)
pids.write_bytes(daemon.stdout.readline())
time.sleep(600)
"""


def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environ["PYTHONPATH"] = str(Path(__file__).parent)
    home = tmp_path / "home"
    home.mkdir()
    run = subprocess.Popen([sys.executable, "-c", RUN, str(home), str(pids)], env=environ)
    try:
        started = wait_until(lambda: pids.exists() and pids.read_text().split())
        assert len(started) == 3 and not any(has_ended(int(pid)) for pid in started)
    finally:
        run.kill()
        run.wait()

    wait_until(lambda: all(has_ended(int(pid)) for pid in started))
