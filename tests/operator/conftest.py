from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cortex.home import Home
from harness.homes import temporary_home

if TYPE_CHECKING:
    from harness.installations.running import RunningOperator


@pytest.fixture(scope="module")
def running() -> Iterator[RunningOperator]:
    """An operator for all tests of a module."""
    from harness.installations.running import running_operator  # noqa: PLC0415 - only for tests that start processes

    with temporary_home() as home, running_operator(home) as running:
        yield running


@pytest.fixture
def operator(running: RunningOperator) -> Iterator[RunningOperator]:
    """An operator without APIs, which other tests use too."""
    yield running
    running.clear()


@pytest.fixture
def own_operator(home: Home) -> Iterator[RunningOperator]:
    """An operator that no other test uses."""
    from harness.installations.running import running_operator  # noqa: PLC0415 - likewise

    with running_operator(home) as running:
        yield running
