"""A corpus of mistakes: each folder is a project; its `expected.txt` lists all of its diagnostics."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.errors import ConfigError
from cortex.operator.deploy.diagnose import diagnose

CORPUS = Path(__file__).parent.parent / "fixtures" / "mistakes"
FOLDERS = sorted(path.name for path in CORPUS.iterdir() if path.is_dir())


def test_the_corpus_is_large_enough() -> None:
    assert len(FOLDERS) >= 60
    assert sum(name.startswith("src-") for name in FOLDERS) >= 12
    assert sum(name.startswith("models-") for name in FOLDERS) >= 25


@pytest.mark.parametrize("name", FOLDERS)
def test_reports_a_mistake_with_line_message_and_fix(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        diagnose(CORPUS / name / "cortex.yaml", "cortex.yaml")
    assert str(raised.value).splitlines() == (CORPUS / name / "expected.txt").read_text().splitlines()
    assert all(diagnostic.fix for diagnostic in raised.value.diagnostics)
    assert raised.value.exit_code == 2
