"""Serve a Python class as a live HTTP API; the public names of the package.

Nothing heavy is imported here: replicas import this package too, and they must start in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cortex.client import Client as Client
    from cortex.client import client as client

__version__ = "0.1.0"

__all__ = ["Client", "__version__", "client"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "client"):
        from cortex import client as module  # noqa: PLC0415 - deferred so that replicas stay small

        return module.Client if name == "Client" else module.client
    raise AttributeError(f"module 'cortex' has no attribute {name!r}")
