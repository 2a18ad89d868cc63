from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cortex
from cortex.cli.upgraded_processes import environment_of, own_environments, runs_this_version

pytestmark = pytest.mark.processes


@contextmanager
def running(python: str | Path) -> Iterator[int]:
    """Run an interpreter that waits; yield its process id."""
    process = subprocess.Popen([python, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    with process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


def environment(folder: Path, layer_on: str = "") -> Path:
    """Create an environment, perhaps that of a project; return its interpreter."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    if layer_on:
        text = f"import site; site.addsitedir({layer_on!r}); site.addsitedir('/elsewhere')\n"
        (packages / "cortex_installation.pth").write_text(text)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder / "bin" / "python"


def test_a_process_of_this_environment_runs_this_version(tmp_path: Path) -> None:
    own = environment(tmp_path / "project", sysconfig.get_path("purelib"))
    for python in (sys.executable, own):
        with running(python) as pid:
            assert environment_of(pid) in own_environments() and runs_this_version(pid)


def test_a_process_of_another_environment_is_named_by_it(tmp_path: Path) -> None:
    old = tmp_path / "0.2"
    layered = environment(tmp_path / "project", str(old / "lib" / "python3.11" / "site-packages"))
    for python in (environment(old), layered):
        with running(python) as pid:
            assert environment_of(pid) == old and not runs_this_version(pid)


def test_a_process_from_before_an_upgrade_of_its_environment_runs_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(sys.executable) as pid:
        (tmp_path / "new.py").touch()
        monkeypatch.setattr(cortex, "__file__", str(tmp_path / "new.py"))
        assert environment_of(pid) in own_environments() and not runs_this_version(pid)


def test_a_process_that_has_ended_runs_nothing() -> None:
    with running(sys.executable) as pid:
        pass
    assert environment_of(pid) is None and not runs_this_version(pid)
