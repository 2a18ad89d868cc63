"""Fixtures of the tests of the registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from registry_bench import Bench, with_models


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., Bench]:
    return lambda *models, **limits: with_models(Bench(tmp_path, **limits), models)
