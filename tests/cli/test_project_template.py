"""Projects that `cortex init` writes; `test_commands.py` deploys some."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from cortex.cli.project_template import FRAMEWORKS, KINDS, project_files
from cortex.lifecycle import ApiKind
from cortex.operator.deploy.diagnose import Machine, diagnose
from harness.config_files import editor_problems


def write(folder: Path, kind: ApiKind, framework: str, is_installed: bool = True) -> set[str]:
    files = project_files("iris", kind, framework, is_installed)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return set(files)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_project_has_no_mistakes(tmp_path: Path, kind: ApiKind, framework: str) -> None:
    names = write(tmp_path, kind, framework, is_installed=False)
    found = diagnose(tmp_path / "cortex.yaml", "cortex.yaml", machine=Machine({}))

    assert [(api.name, api.kind) for api in found.apis] == [("iris", kind)]
    assert editor_problems((tmp_path / "cortex.yaml").read_bytes()) == []
    sample: dict[ApiKind, set[str]] = {ApiKind.BATCH: {"job.json"}, ApiKind.TASK: set()}
    assert names >= sample.get(kind, {"sample.json"})
    assert ("requirements.txt" in names) == (framework != "python")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_installed_framework_is_no_requirement(framework: str) -> None:
    assert "requirements.txt" not in project_files("iris", ApiKind.REALTIME, framework, is_installed=True)


@pytest.mark.parametrize("framework", ["python", pytest.param("sklearn", marks=pytest.mark.heavy), "onnx"])
def test_the_code_answers_its_sample(tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if FRAMEWORKS[framework].module and not importlib.util.find_spec(FRAMEWORKS[framework].module):
        pytest.skip(f"{framework} is not installed")
    write(tmp_path, ApiKind.REALTIME, framework)
    monkeypatch.chdir(tmp_path)
    code: dict[str, Any] = {}
    exec((tmp_path / "handler.py").read_text(), code)

    sample = json.loads((tmp_path / "sample.json").read_text())
    answer = code["Handler"]({}).handle_post(sample)

    assert len(json.loads(json.dumps(answer))["predictions"]) == len(sample["values"])
