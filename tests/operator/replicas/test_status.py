from __future__ import annotations

from datetime import timedelta

import pytest

from cortex.lifecycle import ApiStatus, DeathCause, ProcessState
from cortex.operator.replicas.plan import Replica
from cortex.operator.replicas.status import STALLED_AFTER, ApiState, status_of, through_gateway
from cortex.operator.revisions.preparation_states import Preparation, Stage
from cortex.state.queries.apis import StoredFailure
from cortex.worker.spec import Death, StartFailure
from harness.replicas.fleet import (
    BROKEN,
    FAILED,
    NOW,
    READY,
    RESTARTING,
    STARTING,
    UNREADY,
    api,
    deployed,
    process,
    record,
    replica,
)

DONE = Preparation(Stage.DONE)
OOM = process(
    state=ProcessState.BACKING_OFF, failed_starts=1, death=Death(DeathCause.OUT_OF_MEMORY, "out of memory", 0.0)
)
KEEPS_DYING = process(
    state=ProcessState.BACKING_OFF, restarts=5, death=Death(DeathCause.EXITED, "exited with code 3", 0.0)
)
RETRYING = process(state=ProcessState.STARTING, failed_starts=2, failure=BROKEN)


def status(replicas: list[Replica], wanted: int = 1, minimum: int | None = None, **changes: object) -> ApiState:
    preparation = changes.pop("preparation", DONE)
    leaving = changes.pop("leaving", [])
    age = changes.pop("age", timedelta())
    spec = api(replicas=minimum or wanted, autoscaling={"init_replicas": wanted})
    return status_of(record(deployed("r2", spec), **changes), replicas, leaving, preparation, NOW + age)  # type: ignore[arg-type]


def new(*processes: object) -> Replica:
    return replica("new", *processes, revision="r2")  # type: ignore[arg-type]


OLD = replica("old", revision="r1")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (status([]), ApiStatus.UPDATING),
        (status([new(STARTING)]), ApiStatus.UPDATING),
        (status([new(READY)]), ApiStatus.LIVE),
        (status([new(READY), OLD]), ApiStatus.LIVE),
        (status([OLD]), ApiStatus.UPDATING),
        (status([new(READY, STARTING)]), ApiStatus.UPDATING),
        (status([new(RESTARTING)]), ApiStatus.UPDATING),
        (status([new(UNREADY)]), ApiStatus.ERROR),
        (status([new(READY, UNREADY)]), ApiStatus.ERROR),
        (status([new(FAILED)]), ApiStatus.ERROR),
        (status([new(RETRYING)]), ApiStatus.ERROR),
        (status([new(KEEPS_DYING)]), ApiStatus.ERROR),
        (status([new(FAILED), OLD]), ApiStatus.ERROR),
        (status([new(OOM)]), ApiStatus.OOM),
        (status([new(READY), new(OOM)], wanted=2), ApiStatus.OOM),
        (status([new(READY)], wanted=3, minimum=1), ApiStatus.LIVE),
        (status([], preparation=Preparation(failure=BROKEN)), ApiStatus.ERROR),
        (status([], preparation=Preparation(Stage.RUNNING, BROKEN)), ApiStatus.ERROR),
        (status([], failure=StoredFailure("bad")), ApiStatus.ERROR),
        (status([new(READY)], failure=StoredFailure("bad")), ApiStatus.LIVE),
        (status([], age=STALLED_AFTER * 2), ApiStatus.STALLED),
        (status([], age=STALLED_AFTER * 2, preparation=Preparation(Stage.RUNNING)), ApiStatus.UPDATING),
        (status([new(STARTING)], wanted=2, age=STALLED_AFTER * 2), ApiStatus.UPDATING),
    ],
)
def test_status(state: ApiState, expected: ApiStatus) -> None:
    assert state.status is expected


def test_counts_replicas_by_state() -> None:
    replicas = [new(READY), new(STARTING), new(FAILED), OLD]
    state = status(replicas, wanted=5, leaving=[replica("leaving", revision="r1")])
    updated, stale = state.updated, state.stale
    assert (updated.ready, updated.initializing, updated.failed, updated.pending) == (1, 1, 1, 2)
    assert (stale.ready, stale.terminating) == (1, 1)
    assert (state.requested, state.ready) == (5, 2)


def test_the_users_exception_has_precedence_over_the_cause_of_death() -> None:
    died = process(state=ProcessState.BACKING_OFF, failed_starts=1, failure=BROKEN, death=OOM.death)
    assert status([new(died)]).failure == BROKEN
    assert status([new(OOM)]).failure == StartFailure("out of memory", summary="out of memory")


def test_the_json_has_the_documented_keys() -> None:
    data = status([new(FAILED)]).to_json()
    assert (data["status_code"], data["message"]) == ("error", "error")
    assert data["failure"] == {"message": BROKEN.message, "traceback": BROKEN.traceback}
    assert set(data["replica_counts"]) == {"requested", "updated", "stale"}
    slow = process(state=ProcessState.STARTING, waits_for="GET /health answered 503")
    assert status([new(slow)]).to_json()["waits_for"] == "GET /health answered 503"


def test_an_api_that_needs_no_replica_is_live_once_its_revision_has_served() -> None:
    newest = deployed("r2", api(autoscaling={"min_replicas": 0}))
    starting = [new(STARTING)]
    assert status_of(record(newest), starting, [], DONE, NOW).status is ApiStatus.UPDATING
    assert status_of(record(newest, deployed("r1")), starting, [], DONE, NOW).status is ApiStatus.UPDATING
    assert status_of(record(newest, newest, replicas=0), [], [], DONE, NOW).status is ApiStatus.LIVE
    assert status_of(record(newest, newest, replicas=1), starting, [], DONE, NOW).status is ApiStatus.LIVE


@pytest.mark.parametrize(
    ("own", "is_late", "failure", "expected", "reason"),
    [
        (READY, False, "", ApiStatus.LIVE, None),
        (READY, True, "", ApiStatus.UPDATING, None),
        (READY, True, "no space", ApiStatus.ERROR, "the gateway can't apply its new routes: no space"),
        (STARTING, True, "no space", ApiStatus.UPDATING, None),
        (FAILED, True, "no space", ApiStatus.ERROR, BROKEN.message),
    ],
)
def test_a_ready_api_is_live_once_its_routes_are_in_force(
    own: object, is_late: bool, failure: str, expected: ApiStatus, reason: str | None
) -> None:
    seen = through_gateway(status([new(own)]), is_late, failure)
    assert (seen.status, seen.failure and seen.failure.message) == (expected, reason)
