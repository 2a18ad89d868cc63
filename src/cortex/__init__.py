"""Serve a Python class as a live HTTP API: the public names of the package.

Nothing heavy is imported here, because replicas import this package and must start in milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cortex.client import Client as Client
    from cortex.client import client as client
    from cortex.client import env_delete as env_delete
    from cortex.client import env_list as env_list
    from cortex.client import new_client as new_client
    from cortex.payloads.annotated_arrays import Shape as Shape
    from cortex.predictor.routes import route as route
    from cortex.worker.http.cancellation import cancelled as cancelled

    __version__: str

__all__ = ["Client", "Shape", "__version__", "cancelled", "client", "env_delete", "env_list", "new_client", "route"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cortex' has no attribute {name!r}")
    if name == "__version__":
        # On first use, because the import takes 30 ms.
        globals()[name] = importlib.import_module("importlib.metadata").version("cortex-serving")
        return globals()[name]
    if name == "Shape":
        return importlib.import_module("cortex.payloads.annotated_arrays").Shape
    if name == "cancelled":
        return importlib.import_module("cortex.worker.http.cancellation").cancelled
    if name == "route":
        return importlib.import_module("cortex.predictor.routes").route
    module = importlib.import_module("cortex.client")
    # `cortex.client` is both a package and a function: the package is callable.
    return module if name == "client" else getattr(module, name)
