"""Builds desired APIs and replicas in any state, for tests of the code that decides on them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from cortex.config.schema import Api
from cortex.lifecycle import DeathCause, ProcessState
from cortex.operator.replicas.plan import Replica
from cortex.state.queries.apis import ApiRecord
from cortex.state.revision import Revision
from cortex.worker.spec import Death, ProcessStatus, ReplicaStatus, StartFailure
from harness.replicas.specs import replica_spec

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BROKEN = StartFailure("ValueError: bad weights", 'File "handler.py", line 3', summary="ValueError while it started")


def api(name: str = "iris", replicas: int = 1, processes: int = 1, **sections: Any) -> Api:
    return Api.model_validate(
        {
            "name": name,
            "handler": {
                "interface": "handler",
                "type": "python",
                "path": "handler.py",
                "processes_per_replica": processes,
            },
            **sections,
            "autoscaling": {"min_replicas": replicas, **sections.get("autoscaling", {})},
        }
    )


def deployed(revision: str = "r1", spec: Api | None = None) -> Revision:
    return Revision(revision, spec or api(), f"project-of-{revision}")


def record(newest: Revision, serving: Revision | None = None, **changes: Any) -> ApiRecord:
    spec = newest.spec
    base = ApiRecord(spec.name, spec.kind, None, newest, "nonce", "spec", "api-id", NOW, NOW, serving)
    return replace(base, **changes)


def process(index: int = 0, state: ProcessState = ProcessState.READY, **changes: Any) -> ProcessStatus:
    return ProcessStatus(index, f"/sockets/{index}", state, pid=100 + index, **changes)


READY = process()
STARTING = process(state=ProcessState.STARTING)
RESTARTING = process(
    state=ProcessState.STARTING, restarts=1, death=Death(DeathCause.SEGMENTATION_FAULT, "segmentation fault", 0)
)
#: A command whose probes fail, after a restart.
UNREADY = process(state=ProcessState.STARTING, restarts=1, failure=BROKEN)
FAILED = process(state=ProcessState.BACKING_OFF, restarts=1, failed_starts=1, failure=BROKEN)


def replica(
    id: str,
    *processes: ProcessStatus,
    revision: str = "r1",
    name: str = "iris",
    started_at: float = 0.0,
    slots: int = 1,
) -> Replica:
    numbered = tuple(replace(item, index=index) for index, item in enumerate(processes or (READY,)))
    spec = replica_spec(
        id=id,
        api=name,
        revision=revision,
        sockets=tuple(f"/sockets/{id}-{item.index}" for item in numbered),
    )
    return Replica(spec, ReplicaStatus(id, name, revision, 1, started_at, numbered, slots))
