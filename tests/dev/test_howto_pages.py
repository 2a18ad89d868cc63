"""The pages of guides show projects and tests that work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
HOWTO = ROOT / "docs" / "howto"


def test_the_project_and_the_tests_of_the_guide_pass(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (HOWTO / "test.md").read_text(), re.MULTILINE | re.DOTALL)
    config = next(code for language, code in blocks if language == "yaml")
    handler, tests = (code for language, code in blocks if language == "python")
    for name, text in (("cortex.yaml", config), ("handler.py", handler), ("test_api.py", tests)):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout
