"""The part of an API's desired state from which its processes are made. Without the database, which imports slowly."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.config.schema import Api


@dataclass(frozen=True)
class Target:
    """A revision that replicas can be started from."""

    revision: str
    spec: Api
    project_hash: str
