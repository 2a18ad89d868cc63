"""Session of one command: home, environment variables and console, with access to clients.

The client is imported on first use, because commands such as `cortex version` do not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortex.cli.output import Console
from cortex.home import Home

if TYPE_CHECKING:
    from cortex.client.client import Client
    from cortex.client.environments import Environments


@dataclass(frozen=True)
class Session:
    """Everything that a command uses besides its arguments."""

    home: Home
    environ: Mapping[str, str]
    console: Console

    @property
    def environments(self) -> Environments:
        """The user's environments."""
        from cortex.client.environments import Environments  # noqa: PLC0415 - see above

        return Environments.from_environ(self.environ)

    def client(self, env: str | None) -> Client:
        """Return the client of an environment; None: of the default one. Raises: NotFoundError."""
        from cortex.client.client import Client  # noqa: PLC0415 - see above

        return Client(self.environments.get(env))

    @property
    def is_interactive(self) -> bool:
        """True if a user can answer questions: standard input is a terminal."""
        return sys.stdin is not None and sys.stdin.isatty()

    def confirm(self, question: str) -> bool:
        """Ask a user a question; return whether the answer is yes. Call it only if `is_interactive`."""
        self.console.ask(f"{question} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def is_local(self, client: Client) -> bool:
        """Return whether a client belongs to the local environment."""
        from cortex.client.environments import LOCAL  # noqa: PLC0415 - see above

        return client.environment.name == LOCAL

    def start_local_operator(self, check: Callable[[], None]) -> None:
        """Start the operator of the local environment, unless `check`, which runs meanwhile, raises an error."""
        from cortex.client.local_operator import ListenOptions, start  # noqa: PLC0415 - only without an operator

        def check_first() -> None:
            check()
            self.console.begin("starting the operator")

        self.home.prepare()
        operator, is_new = start(self.home, ListenOptions(), check_first)
        if is_new:
            self.console.note(f"started the operator at {operator.url} and the gateway at {operator.gateway_url}")
