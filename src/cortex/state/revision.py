"""The part of an API's desired state from which its processes are made. Without the database, which imports slowly."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.config.schema import Api


@dataclass(frozen=True)
class Revision:
    """A revision that replicas can be started from."""

    hash: str  #: of everything whose change needs new processes
    spec: Api
    project_hash: str
