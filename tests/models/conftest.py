"""Fixtures of the tests of the registry and of model agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cortex.home import Home
from harness.models.model_agents import RunningAgent, put
from harness.models.registry_bench import Bench, with_models


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., Bench]:
    return lambda *models, **limits: with_models(Bench(tmp_path, **limits), models)


@pytest.fixture
def agent(home: Home) -> Iterator[RunningAgent]:
    agent = RunningAgent(home)
    yield agent
    agent.stop()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder of models with one version of one model."""
    put(tmp_path / "models" / "iris" / "1" / "model.pkl", b"one")
    return tmp_path / "models"
