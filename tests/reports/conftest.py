"""The installation of a test process, which reports share with end-to-end tests."""

from harness.installations.shared import cortex, shared_installation

__all__ = ["cortex", "shared_installation"]
