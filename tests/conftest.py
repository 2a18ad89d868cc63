"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A CORTEX_HOME of the test's own."""
    home = Home(tmp_path / "home")
    home.create()
    return home
