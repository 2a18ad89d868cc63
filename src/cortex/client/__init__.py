"""Python client; the command line uses the same class. Depends on the operator's HTTP routes only.

The package is callable because `cortex.client` is both this package and a function of that name.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from cortex.client.client import Client
from cortex.client.environments import Environments

__all__ = ["Client", "client", "env_delete", "env_list", "new_client"]


def client(env: str | None = None) -> Client:
    """Return a client of the environment `env`; None: the default environment. Raises: NotFoundError."""
    return Client(Environments.from_environ(os.environ).get(env))


def new_client(name: str, operator_endpoint: str, token: str = "", ca: str | None = None) -> Client:
    """Store an environment, replacing one of the same name, and return its client.

    `ca`: a file of CA certificates to trust instead of those of the system.
    """
    return Client(Environments.from_environ(os.environ).configure(name, operator_endpoint, token, ca))


def env_list() -> list[dict[str, str]]:
    """Return name and operator endpoint of every environment."""
    return [environment.describe() for environment in Environments.from_environ(os.environ).known()]


def env_delete(name: str) -> None:
    """Delete an environment; its operator is not affected. Raises: NotFoundError."""
    Environments.from_environ(os.environ).delete(name)


class _CallableModule(ModuleType):
    def __call__(self, env: str | None = None) -> Client:
        return client(env)


# Importing a submodule binds it to its name in the parent, so `cortex.client` is this module from then on.
sys.modules[__name__].__class__ = _CallableModule
