"""A corpus of mistakes: each folder is a project; its `expected.txt` lists all of its diagnostics.

A project without a file that its configuration names gets the usual, faultless one of that name, if there is one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cortex.errors import ConfigError
from cortex.operator.deploy.diagnose import diagnose

FIXTURES = Path(__file__).parent.parent / "fixtures"
CORPUS = FIXTURES / "mistakes"
FOLDERS = sorted(path.name for path in CORPUS.iterdir() if path.is_dir())
#: Those whose check runs protoc are slower.
_MARKED = [pytest.param(name, marks=pytest.mark.processes) if name.startswith("grpc-") else name for name in FOLDERS]


def test_the_corpus_is_large_enough() -> None:
    assert len(FOLDERS) >= 60
    assert sum(name.startswith("src-") for name in FOLDERS) >= 12
    assert sum(name.startswith("models-") for name in FOLDERS) >= 25


@pytest.mark.parametrize("name", _MARKED)
def test_reports_a_mistake_with_line_message_and_fix(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        diagnose(copy_project(name, tmp_path / name) / "cortex.yaml", "cortex.yaml")
    assert str(raised.value).splitlines() == (CORPUS / name / "expected.txt").read_text().splitlines()
    assert all(diagnostic.fix for diagnostic in raised.value.diagnostics)
    assert raised.value.exit_code == 2


def test_a_script_may_write_the_files_that_requirements_include(tmp_path: Path) -> None:
    folder = copy_project("src-97-requirements-of-absent-files", tmp_path / "project")
    (folder / "dependencies.sh").write_text("pip-compile pyproject.toml -o bass.txt\n")
    diagnose(folder / "cortex.yaml", "cortex.yaml")


def copy_project(name: str, folder: Path) -> Path:
    """Copy a project of the corpus, and complete it with the usual files that its configuration names."""
    shutil.copytree(CORPUS / name, folder)
    config = (folder / "cortex.yaml").read_bytes()
    for usual in (FIXTURES / "mistakes_code" / ("models" if name.startswith("models-") else "other")).iterdir():
        if usual.name.encode() in config and not any(folder.rglob(usual.name)):
            shutil.copy(usual, folder)
    return folder
