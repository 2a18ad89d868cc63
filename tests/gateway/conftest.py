"""Fixture: a home whose path is short enough for unix sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.home import Home


@pytest.fixture
def home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:
        home = Home(Path(folder))
        home.create()
        yield home
