"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from cortex.home import Home
from harness.servers.buckets import swift, swift_server
from harness.servers.databases import postgres, postgresql_url, where

__all__ = ["home", "postgres", "postgresql_url", "swift", "swift_server", "where"]

# A shell has what it starts in the background ignore interrupts, and so would all that is started and interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Files of tests/cluster whose tests want a Ray cluster.
_ON_RAY = re.compile(r"(^|_)ray(_|$)")

# Thousands of tests are made now, none of which becomes garbage.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what wants a Ray cluster, so that one process runs all of it."""
    for item in items:
        if item.path.parent.name == "cluster" and _ON_RAY.search(item.path.stem):
            item.add_marker(pytest.mark.ray)


def pytest_collection_finish() -> None:
    """Have no collection of garbage walk all tests again: some of what is tested collects it hundreds of times."""
    gc.collect()
    gc.freeze()
    gc.enable()


# How long one example takes says more about the machine than about the code.
settings.register_profile("cortex", deadline=None)
settings.load_profile("cortex")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A CORTEX_HOME of the test's own."""
    home = Home(tmp_path / "home")
    home.create()
    yield home
    shutil.rmtree(home.metrics_dir, ignore_errors=True)  # it may be outside of the home
