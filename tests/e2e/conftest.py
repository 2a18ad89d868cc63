"""Modules of end-to-end tests share one installation per test process."""

from harness.installations.shared import cortex, shared_installation

__all__ = ["cortex", "shared_installation"]
