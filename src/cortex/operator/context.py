"""The context of all subsystems of the operator: home, settings, database, and the events that wake control loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from sqlalchemy import Engine as Database

from cortex.config.schema import Api
from cortex.home import Home
from cortex.installation import Installation
from cortex.operator.bootstrap import ensure_shared_token, ensure_token
from cortex.operator.deploy.projects import ProjectFolders
from cortex.operator.settings import OperatorSettings
from cortex.state.queries.apis import ApiStore
from cortex.state.queries.key_values import KeyValueStore
from cortex.telemetry import Logger

#: Coroutine functions that run until they are cancelled, by the names of their tasks.
Loops = Mapping[str, Callable[[], Coroutine[Any, Any, None]]]


class Wakes:
    """The two control loops that wait for changes, and what wakes them.

    replicas, nodes, gateways, preparations, node agents ──> both
    deploys, canaries, autoscaling                        ──> replicas
    submissions, stops of jobs, reports of job workers    ──> jobs
    """

    def __init__(self) -> None:
        self.replicas = asyncio.Event()
        self.jobs = asyncio.Event()

    def both(self) -> None:
        """Request a pass of both loops."""
        self.replicas.set()
        self.jobs.set()


@dataclass(frozen=True)
class OperatorContext:
    """One per operator."""

    home: Home
    settings: OperatorSettings
    installation: Installation
    database: Database
    epoch: int | None  #: of the leadership; None with SQLite
    logger: Logger
    wakes: Wakes = field(default_factory=Wakes)
    clock: Callable[[], float] = time.time  #: UNIX seconds

    @cached_property
    def apis(self) -> ApiStore:
        """The desired APIs."""
        return ApiStore(self.database, lambda: datetime.fromtimestamp(self.clock(), UTC))

    @cached_property
    def facts(self) -> KeyValueStore:
        """Values that are neither of an API nor of a job."""
        return KeyValueStore(self.database)

    @cached_property
    def projects(self) -> ProjectFolders:
        """The folders of the deployed projects."""
        return ProjectFolders(self.home)

    @property
    def is_shared(self) -> bool:
        """Return whether other operators, of which one leads, use the database too."""
        return self.installation.database is not None

    @cached_property
    def token(self) -> str:
        """The token of the home; the first operator creates it."""
        return ensure_shared_token(self.home, self.facts) if self.is_shared else ensure_token(self.home)

    def endpoint(self, api: Api) -> str:
        """Return the URL of an API."""
        return self.settings.url(self.settings.gateway_port) + api.networking.endpoint
