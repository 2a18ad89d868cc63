from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.models.user_project import UserProject, user_project


@pytest.fixture
def project(tmp_path: Path) -> Iterator[UserProject]:
    """Yield the empty project folder of a user."""
    root = tmp_path / "project"
    root.mkdir()
    with user_project(root) as project:
        yield project
