"""The packages of a project in its image: locked by an export, installed by the build, found by replicas."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from cortex.config.schema import Dependencies
from cortex.engine.environment import prepare_environment
from cortex.errors import EnvironmentBuildError
from cortex.export.context import BuildContext
from cortex.export.dockerfile import ImageOptions
from cortex.export.environment import build_environment
from cortex.home import Home
from cortex.projects.project import ProjectFiles
from cortex.worker.spec import ENVIRONMENT_COMPILED
from harness.exported_projects import planned, realtime

pytestmark = pytest.mark.processes
OPTIONS = ImageOptions(tag="a", base="b", version="1")


@pytest.fixture
def image(tmp_path: Path) -> Home:
    (tmp_path / "image").mkdir()
    return Home(tmp_path / "image")


def test_replicas_use_the_environment_of_the_image(tmp_path: Path, home: Home, image: Home) -> None:
    project = tmp_path / "project"
    plan = planned(project, {"cortex.yaml": realtime(), "requirements.txt": "idna\n", "b.txt": "six\n"})
    files = ProjectFiles.scan(project, "cortex.yaml")
    context = BuildContext(tmp_path / "out", files, project / "cortex.yaml")
    context.write(plan, OPTIONS, None, ["idna==3.7\n"])

    built = build_environment(tmp_path / "out/environments/1", os.environ, image)
    found = asyncio.run(prepare_environment(home, project, Dependencies(), os.environ, installed=image))

    assert Path(found.python) == built / "env/bin/python"
    assert list(home.environments_dir.iterdir()) == []
    command = [found.python, "-P", "-c", "import idna; print(idna.__version__)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout == "3.7\n"
    assert built.stat().st_mode & 0o777 == 0o755
    assert list(built.rglob("idna/**/core.*.pyc")), "compiled: replicas can't write into the image"
    assert (built / ENVIRONMENT_COMPILED).exists()


def test_versions_stay_locked_until_the_requirement_changes(tmp_path: Path) -> None:
    project, out = tmp_path / "project", tmp_path / "out"

    def lock(requirement: str) -> str:
        plan = planned(project, {"cortex.yaml": realtime(), "requirements.txt": requirement})
        files = ProjectFiles.scan(project, "cortex.yaml")
        context = BuildContext(out, files, project / "cortex.yaml")
        locked = context.lock(plan.environments[0], 1, os.environ)
        context.write(plan, OPTIONS, None, [locked])
        return locked

    assert lock("idna<3.7\n") == "idna==3.6\n"
    assert lock("idna\n") == "idna==3.6\n"
    assert lock("idna>3.7,<3.9\n") == "idna==3.8\n"


def test_versions_that_contradict_each_other_are_reported(tmp_path: Path) -> None:
    project = tmp_path / "project"
    plan = planned(project, {"cortex.yaml": realtime(), "requirements.txt": "idna==3.6\nidna==3.7\n"})
    context = BuildContext(tmp_path / "out", ProjectFiles.scan(project, "cortex.yaml"), project / "cortex.yaml")

    with pytest.raises(EnvironmentBuildError, match="requirements.txt: versions can't be locked"):
        context.lock(plan.environments[0], 1, os.environ)


def test_a_script_gets_the_variables_of_the_api(tmp_path: Path, image: Home) -> None:
    script = 'echo "$A" > "$VIRTUAL_ENV/a.txt"\n'
    config = realtime(handler=", env: {A: '$(id) \"x\"'}")
    project = tmp_path / "project"
    plan = planned(project, {"cortex.yaml": config, "dependencies.sh": script})
    context = BuildContext(tmp_path / "out", ProjectFiles.scan(project, "cortex.yaml"), project / "cortex.yaml")
    context.write(plan, OPTIONS, None, [""])

    built = build_environment(tmp_path / "out/environments/1", os.environ, image)

    assert (built / "env/a.txt").read_text() == '$(id) "x"\n'
    assert json.loads((tmp_path / "out/environments/1/environment.json").read_text())["shell"] == "dependencies.sh"
