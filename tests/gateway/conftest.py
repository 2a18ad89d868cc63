"""Fixture: a home whose path is short enough for unix sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cortex.home import Home
from harness.homes import temporary_home


@pytest.fixture
def home() -> Iterator[Home]:
    with temporary_home() as home:
        yield home
