"""Fixtures of all tests of clusters."""

from __future__ import annotations

import pytest

from cortex.cluster.node_client import SILENCE_S
from harness.cluster.shared_cluster import cached_packages, cluster, on_ray, surroundings
from harness.wait import SLACK

__all__ = ["cached_packages", "cluster", "on_ray", "surroundings"]


@pytest.fixture(autouse=True)
def patience_with_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine, an agent may send no heartbeat for seconds."""
    monkeypatch.setattr("cortex.cluster.node_client.SILENCE_S", SILENCE_S * SLACK)
