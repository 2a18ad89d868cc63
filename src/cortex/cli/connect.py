"""From a command's `-e` to a client, and to the local operator where a command may start it."""

from __future__ import annotations

import importlib
from typing import Any

from cortex.cli.context import Context
from cortex.client.client import Client
from cortex.client.environments import LOCAL, Environments


def environments_of(context: Context) -> Environments:
    """Return the user's environments."""
    return Environments.from_environ(context.environ)


def client_of(context: Context, env: str | None) -> Client:
    """Return the client of an environment, of the default one without a name. Raises: NotFoundError."""
    return Client(environments_of(context).get(env))


def start_local_operator(client: Client, context: Context) -> bool:
    """Start this machine's operator if it is the client's and does not run; return whether it was started."""
    if client.environment.name != LOCAL:
        return False
    # Loaded here, as commands are: while an operator runs, nobody needs it.
    process: Any = importlib.import_module("cortex.client.local_operator")
    context.console.progress("starting the operator")
    operator, is_new = process.start(context.home, process.Settings())
    if is_new:
        context.console.note(f"started the operator at {operator.url} and the gateway at {operator.gateway_url}")
    return True
