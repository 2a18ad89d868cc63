from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import requires
from pathlib import Path

import grimp
import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cortex.config.schema import Dependencies
from cortex.engine.environment import (
    REPLICA_REQUIREMENTS,
    PreparedEnvironment,
    prepare_environment,
    replica_constraints,
)
from cortex.errors import EnvironmentBuildError
from cortex.home import Home
from harness.wait import has_ended, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def build(
    home: Home, project: Path, variables: Mapping[str, str] | None = None, lines: list[str] | None = None, **files: str
) -> PreparedEnvironment:
    found = lines if lines is not None else []
    return asyncio.run(prepare_environment(home, project, Dependencies(**files), os.environ, variables, found.append))


def run_python(environment: PreparedEnvironment, code: str) -> str:
    command = [environment.python, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()


def remaining_files(home: Home) -> list[str]:
    return [path.name for path in home.environments_dir.iterdir() if path.is_dir()]


@pytest.mark.parametrize("requirements", [None, "", "# numpy\n\n"])
def test_a_project_without_dependencies_builds_nothing(home: Home, project: Path, requirements: str | None) -> None:
    if requirements is not None:
        (project / "requirements.txt").write_text(requirements)
    assert build(home, project) == PreparedEnvironment(sys.executable, str(Path(sys.executable).parent), "")
    assert list(home.environments_dir.iterdir()) == []


def test_a_requirement_is_installed_on_top_of_the_installation(home: Home, project: Path) -> None:
    (project / "requirements.txt").write_text("six==1.16.0\n")
    environment = build(home, project)
    assert run_python(environment, "import six; print(six.__version__, six.__file__)").startswith(
        f"1.16.0 {home.environments_dir}"
    )
    # The packages of the installation, including ours (editable or not), are available.
    assert run_python(environment, "import cortex.errors, uvloop, pydantic; print(pydantic.__file__)").startswith(
        str(Path(sys.prefix))
    )


def test_the_environments_own_packages_come_first(home: Home, project: Path) -> None:
    (project / "requirements.txt").write_text("idna==3.7\n")
    assert run_python(build(home, project), "import idna; print(idna.__version__)") == "3.7"


def test_equal_requirements_share_one_environment(home: Home, project: Path, tmp_path: Path) -> None:
    (project / "requirements.txt").write_text("six\n")
    lines: list[str] = []
    first = build(home, project, lines=lines)
    other = tmp_path / "other"
    (other / "deps").mkdir(parents=True)
    (other / "requirements.txt").write_text("six\n")
    (other / "code.py").write_text("x = 1")
    assert lines
    lines.clear()
    assert build(home, other, lines=lines) == first
    assert lines == []
    (other / "requirements.txt").write_text("six==1.16.0\n")
    assert build(home, other).key != first.key


def test_dependency_files_can_be_elsewhere(home: Home, project: Path) -> None:
    (project / "deps").mkdir()
    (project / "deps" / "python.txt").write_text("-r more.txt\n")
    (project / "deps" / "more.txt").write_text("six==1.16.0\n")
    first = build(home, project, pip="deps/python.txt")
    assert run_python(first, "import six; print(six.__version__)") == "1.16.0"
    (project / "deps" / "more.txt").write_text("six==1.17.0\n")
    second = build(home, project, pip="deps/python.txt")
    assert run_python(second, "import six; print(six.__version__)") == "1.17.0"


def write_package(project: Path, value: str) -> None:
    package = project / "mine"
    package.mkdir(parents=True)
    (package / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\n[build-system]\nrequires = ["setuptools"]\n'
        'build-backend = "setuptools.build_meta"\n[tool.setuptools]\npy-modules = ["mine"]\n'
    )
    (package / "mine.py").write_text(f"VALUE = {value}\n")


def test_a_local_package_is_rebuilt_when_it_changes(home: Home, tmp_path: Path) -> None:
    for value in ("1", "2"):
        # As in real projects, changed content is in another folder.
        write_package(tmp_path / value, value)
        (tmp_path / value / "requirements.txt").write_text("./mine\n")
        assert run_python(build(home, tmp_path / value), "import mine; print(mine.VALUE)") == value


@pytest.mark.parametrize("requirement", ["./mine", "-e ./mine"])
def test_installing_a_package_of_the_project_leaves_the_project_unchanged(
    home: Home, project: Path, requirement: str
) -> None:
    write_package(project, "1")
    (project / "requirements.txt").write_text(f"{requirement}\n")
    before = sorted(project.rglob("*"))
    environment = build(home, project)
    assert run_python(environment, "import mine; print(mine.VALUE)") == "1"
    assert sorted(project.rglob("*")) == before
    assert build(home, project) == environment


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        ("starlette==0.1\n", ["starlette==0.1", "cortex itself needs starlette>="]),
        ("anyio<3\n", ["anyio<3", "cortex itself needs anyio"]),
        ("six==999.0\n", ["six==999.0"]),
        ("no-such-package-of-anybody-8731\n", ["no-such-package-of-anybody-8731 was not found"]),
    ],
)
def test_a_failed_installation_is_reported_and_leaves_nothing(
    home: Home, project: Path, requirements: str, expected: list[str]
) -> None:
    (project / "requirements.txt").write_text(requirements)
    with pytest.raises(EnvironmentBuildError) as caught:
        build(home, project)
    message = str(caught.value)
    assert message.startswith("requirements.txt: can't be installed")
    for part in expected:
        assert part in message
    log = Path(message.rpartition("the whole output is in ")[2])
    assert "No solution found" in log.read_text()
    assert remaining_files(home) == []


def test_the_script_runs_first_in_the_project_with_the_environments_programs(home: Home, project: Path) -> None:
    (project / "dependencies.sh").write_text(
        "pwd\necho $GREETING\nwhich python pip\npip install --quiet six==1.15.0\ncat words.txt\n"
    )
    (project / "words.txt").write_text("first words\n")
    (project / "requirements.txt").write_text("idna\n")
    lines: list[str] = []
    environment = build(home, project, {"GREETING": "hello"}, lines)
    expected = [str(project), "hello", f"{environment.bin_dir}/python", f"{environment.bin_dir}/pip", "first words"]
    assert [line for line in lines if line in expected] == expected
    assert run_python(environment, "import six; print(six.__version__)") == "1.15.0"
    assert environment.variables({"PATH": "/bin"})["PATH"] == f"{environment.bin_dir}:/bin"
    (project / "words.txt").write_text("other words\n")
    lines.clear()
    assert build(home, project, {"GREETING": "hello"}, lines).key != environment.key
    assert "other words" in lines


def test_a_failing_script_is_reported_with_the_end_of_its_output(home: Home, project: Path) -> None:
    (project / "dependencies.sh").write_text("echo before\nfalse\necho after\n")
    with pytest.raises(EnvironmentBuildError) as caught:
        build(home, project)
    assert str(caught.value).startswith("dependencies.sh: can't be installed (ended with exit code 1)\nbefore\n")
    assert "after" not in str(caught.value)
    assert remaining_files(home) == []


def test_conda_packages_need_a_conda(home: Home, project: Path) -> None:
    (project / "conda-packages.txt").write_text("rdkit\n")
    with pytest.raises(EnvironmentBuildError, match=r"conda-packages\.txt: needs micromamba, mamba or conda"):
        asyncio.run(prepare_environment(home, project, Dependencies(), {"PATH": "/nowhere"}))
    assert remaining_files(home) == []


def test_conda_creates_the_environment_that_pip_installs_into(home: Home, project: Path, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "micromamba").write_text(
        f'#!/bin/bash\necho "conda $@"\n'
        f'[ $1 = create ] && exec {shlex.quote(sys.executable)} -m venv --without-pip "$4"\ncat "$8"\n'
    )
    (programs / "micromamba").chmod(0o755)
    (project / "conda-packages.txt").write_text("rdkit=2024\n")
    (project / "requirements.txt").write_text("six==1.16.0\n")
    lines: list[str] = []
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    environment = asyncio.run(prepare_environment(home, project, Dependencies(), environ, on_line=lines.append))
    prefix = Path(environment.bin_dir).parent
    version = f"python={sys.version_info.major}.{sys.version_info.minor}"
    assert lines[0] == f"conda create --yes --prefix {prefix} --channel conda-forge {version} pip"
    assert lines[1] == f"conda install --yes --prefix {prefix} --channel conda-forge --file conda-packages.txt"
    assert lines[2] == "rdkit=2024"
    assert run_python(environment, "import six, cortex; print(six.__version__)") == "1.16.0"


def test_builds_of_one_environment_at_the_same_time_run_once(home: Home, project: Path) -> None:
    (project / "dependencies.sh").write_text(f"echo run >> {home.path}/runs\n")

    async def scenario() -> list[PreparedEnvironment]:
        return await asyncio.gather(*(prepare_environment(home, project, Dependencies(), os.environ) for _ in range(4)))

    assert len(set(asyncio.run(scenario()))) == 1
    assert (home.path / "runs").read_text() == "run\n"


BUILD_SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from cortex.config.schema import Dependencies
from cortex.engine.environment import prepare_environment
from cortex.home import Home
print(asyncio.run(prepare_environment(Home(Path(sys.argv[1])), Path(sys.argv[2]), Dependencies(), os.environ)).key)
"""


def start_build(home: Home, project: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD_SCRIPT, str(home.path), str(project)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_operators_build_one_environment_once(home: Home, project: Path) -> None:
    (project / "dependencies.sh").write_text(f"echo run >> {home.path}/runs\n")
    processes = [start_build(home, project) for _ in range(2)]
    keys = {process.communicate(timeout=60)[0] for process in processes}
    assert len(keys) == 1 and all(process.returncode == 0 for process in processes)
    assert (home.path / "runs").read_text() == "run\n"


def test_a_killed_operator_leaves_no_incomplete_environment_in_use(home: Home, project: Path) -> None:
    # The first run waits at a gate that opens after the death of its operator, and ends later.
    gate = home.path / "gate"
    os.mkfifo(gate)
    both_ends = os.open(gate, os.O_RDWR)  # else opening it would wait for a run that may not have come to it yet
    (project / "dependencies.sh").write_text(
        f"echo $$ >> {home.path}/runs\n[ -e {home.path}/open ] || read word < {gate}\n"
    )
    process = start_build(home, project)
    wait_until(lambda: (home.path / "runs").exists() and (home.path / "runs").read_text().strip())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    orphan = int((home.path / "runs").read_text())
    second = start_build(home, project)
    assert not has_ended(orphan)
    (home.path / "open").touch()
    os.write(both_ends, b"go\n")
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert len((home.path / "runs").read_text().splitlines()) == 2
    wait_until(lambda: has_ended(orphan))
    os.close(both_ends)


def test_a_cancelled_build_ends_its_installers_and_leaves_nothing(home: Home, project: Path) -> None:
    (project / "dependencies.sh").write_text(f"sleep 1000 & echo $! > {home.path}/pid; wait\n")

    async def scenario() -> None:
        task = asyncio.create_task(prepare_environment(home, project, Dependencies(), os.environ))
        while not (home.path / "pid").exists() or not (home.path / "pid").read_text().strip():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    pid = int((home.path / "pid").read_text())
    wait_until(lambda: has_ended(pid))
    assert remaining_files(home) == []


@pytest.mark.parametrize("turns", range(8))
def test_a_build_cancelled_while_an_installer_starts_leaves_nothing_running(
    home: Home, project: Path, turns: int
) -> None:
    (project / "dependencies.sh").write_text("sleep 1000 & wait\n")

    async def scenario() -> set[int]:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        task = asyncio.create_task(prepare_environment(home, project, Dependencies(), os.environ))
        while not (started := {child.pid for child in psutil.Process().children(recursive=True)} - before):
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        started |= {child.pid for child in psutil.Process().children(recursive=True)} - before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return started

    for pid in asyncio.run(scenario()):
        wait_until(lambda pid=pid: has_ended(pid))  # type: ignore[misc]


def test_constraints_cover_what_replicas_import() -> None:
    graph = grimp.build_graph("cortex", include_external_packages=True, exclude_type_checking_imports=True)
    roots = [name for name in graph.modules if name.startswith(("cortex.worker.", "cortex.supervisor."))]
    imported = set().union(*map(graph.find_upstream_modules, roots))
    names = {"python_multipart": "python-multipart", "yaml": "pyyaml"}
    required = [Requirement(text) for text in requires("cortex-serving") or []]
    own = {canonicalize_name(each.name) for each in required if "extra" not in str(each.marker)}
    assert {names.get(each, each) for each in imported} & own == set(REPLICA_REQUIREMENTS)


def test_constraints_leave_versions_open_that_the_installed_ones_pin() -> None:
    assert "pydantic>=2.10" in replica_constraints()
    assert not any("==" in line for line in replica_constraints())


def test_constraints_cover_what_replicas_need_indirectly() -> None:
    names = {line.split(">")[0].split("<")[0] for line in replica_constraints()}
    assert {"starlette", "anyio", "idna", "httptools", "orjson", "uvloop"} <= names
    assert not {"pydantic-core", "sqlalchemy", "typer"} & names
