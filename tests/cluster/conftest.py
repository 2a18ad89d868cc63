"""Fixtures of all tests of clusters."""

from __future__ import annotations

from harness.cluster.shared_cluster import cached_packages, cluster, on_ray, surroundings

__all__ = ["cached_packages", "cluster", "on_ray", "surroundings"]
