from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.config.schema import Api
from cortex.lifecycle import ProcessState
from cortex.operator.replicas.plan import Prepare, Promote, Replica, ReplicaAction, Retire, Start, plan, wanted_replicas
from cortex.operator.revisions.preparation_states import Preparation, Stage
from cortex.state.queries.apis import ApiRecord, StoredFailure
from harness.replicas.fleet import (
    BROKEN,
    FAILED,
    READY,
    RESTARTING,
    STARTING,
    api,
    deployed,
    process,
    record,
    replica,
)

DONE = Preparation(Stage.DONE)


def decide(
    desired: ApiRecord, replicas: list[Replica], now: float = 0.0, **preparations: Preparation
) -> list[ReplicaAction]:
    by_revision = {"r1": DONE, "r2": DONE, **preparations}
    return plan([desired], replicas, {("iris", revision): value for revision, value in by_revision.items()}, now)


def started(actions: list[ReplicaAction]) -> list[str]:
    return [action.revision.hash for action in actions if isinstance(action, Start)]


def retired(actions: list[ReplicaAction]) -> list[str]:
    return [action.replica_id for action in actions if isinstance(action, Retire)]


def test_prepares_a_new_api_before_starting_replicas() -> None:
    newest = deployed()
    assert decide(record(newest), [], r1=Preparation()) == [Prepare(newest)]
    assert decide(record(newest), [], r1=Preparation(Stage.RUNNING)) == []


def test_all_replicas_of_a_new_api_start_at_once() -> None:
    assert started(decide(record(deployed(spec=api(replicas=3))), [])) == ["r1"] * 3


def test_plans_nothing_if_the_desired_state_is_reached() -> None:
    assert decide(record(deployed(), deployed()), [replica("a")]) == []


def test_a_revision_is_promoted_once_all_its_replicas_are_ready() -> None:
    newest = deployed(spec=api(replicas=2))
    assert decide(record(newest), [replica("a"), replica("b", STARTING)]) == []
    assert decide(record(newest), [replica("a"), replica("b")]) == [Promote(newest)]


def test_a_changed_spec_of_the_same_revision_is_promoted_and_restarts_nothing() -> None:
    newest = deployed(spec=api(networking={"endpoint": "/other"}))
    assert decide(record(newest, deployed()), [replica("a")]) == [Promote(newest)]


def test_an_update_starts_new_replicas_before_it_retires_old_ones() -> None:
    desired = record(deployed("r2"), deployed("r1"))
    assert decide(desired, [replica("old")]) == [Start(deployed("r2"))]
    assert decide(desired, [replica("old"), replica("new", STARTING, revision="r2")]) == []
    ready = decide(desired, [replica("old"), replica("new", revision="r2")])
    assert ready == [Promote(deployed("r2")), Retire("old")]


def test_an_update_of_many_replicas_respects_max_surge() -> None:
    desired = record(deployed("r2", api(replicas=8)), deployed("r1", api(replicas=8)))
    assert len(started(decide(desired, [replica(f"o{i}") for i in range(8)]))) == 2


def test_without_surge_old_replicas_are_retired_first() -> None:
    strategy = {"max_surge": "0", "max_unavailable": "50%"}
    desired = record(deployed("r2", api(replicas=4, update_strategy=strategy)), deployed("r1", api(replicas=4)))
    olds = [replica(f"o{i}", started_at=i) for i in range(4)]
    assert decide(desired, olds, r2=Preparation()) == [Prepare(desired.target)]
    actions = decide(desired, olds)
    assert retired(actions) == ["o2", "o3"]
    assert started(actions) == ["r2", "r2"]


def test_the_old_revision_keeps_its_full_number_while_the_new_one_fails() -> None:
    desired = record(deployed("r2", api(replicas=3)), deployed("r1", api(replicas=3)))
    failing = replica("new", FAILED, revision="r2")
    assert decide(desired, [replica("a"), replica("b"), replica("c"), failing]) == []
    assert started(decide(desired, [replica("a"), replica("b"), failing])) == ["r1"]


def test_the_old_revision_keeps_its_full_number_while_the_new_environment_fails_to_build() -> None:
    desired = record(deployed("r2"), deployed("r1"))
    broken = Preparation(Stage.NEEDED, BROKEN, hold_until=10)
    assert decide(desired, [replica("a")], r2=broken) == []
    assert started(decide(desired, [], r2=broken)) == ["r1"]
    assert decide(desired, [replica("a")], now=10, r2=broken) == [Prepare(deployed("r2"))]


def test_an_old_replica_lost_during_an_update_is_replaced() -> None:
    desired = record(deployed("r2"), deployed("r1"))
    actions = decide(desired, [replica("new", STARTING, revision="r2")])
    assert started(actions) == ["r1"]


def test_only_one_failing_replica_is_kept() -> None:
    desired = record(deployed(spec=api(replicas=3)))
    actions = decide(desired, [replica(name, FAILED, started_at=at) for at, name in enumerate("abc")])
    assert actions == [Retire("b"), Retire("c")]


def test_keeps_a_replica_with_one_failing_and_one_ready_process() -> None:
    desired = record(deployed(spec=api(replicas=2)))
    half = [replica("a", READY, FAILED), replica("b", READY, FAILED)]
    assert decide(desired, half) == []


def test_scaling_down_keeps_the_oldest_ready_replicas() -> None:
    desired = record(deployed(), deployed())
    replicas = [replica("a", STARTING), replica("b", started_at=2), replica("c", started_at=1)]
    assert retired(decide(desired, replicas)) == ["b", "a"]


def test_a_lost_replica_is_replaced_after_its_back_off() -> None:
    desired = record(deployed(), deployed())
    held = Preparation(Stage.DONE, hold_until=5.0)
    assert decide(desired, [], now=4.9, r1=held) == []
    assert started(decide(desired, [], now=5.0, r1=held)) == ["r1"]


def test_replicas_of_a_deleted_api_are_retired() -> None:
    assert plan([], [replica("a"), replica("b")], {}, 0) == [Retire("a"), Retire("b")]


def test_retires_a_starting_replica_of_a_superseded_revision() -> None:
    desired = record(deployed("r3"), deployed("r1"))
    actions = decide(desired, [replica("old"), replica("mid", STARTING, revision="r2")], r3=DONE)
    assert retired(actions) == ["mid"]
    assert started(actions) == ["r3"]


def test_keeps_an_old_replica_whose_process_restarts() -> None:
    desired = record(deployed("r2"), deployed("r1"))
    assert retired(decide(desired, [replica("old", RESTARTING), replica("new", STARTING, revision="r2")])) == []


# Random sequences of events: replicas start, fail, vanish and recover while specs change.


@dataclass
class World:
    """Applies actions like the reconciler, and simulates events of replicas."""

    desired: ApiRecord
    replicas: dict[str, Replica] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    serial: int = 0

    def serving(self) -> int:
        return sum(item.is_ready for item in self.replicas.values())

    def act(self) -> list[ReplicaAction]:
        preparations = {("iris", revision): DONE for revision in self.prepared}
        before, wanted = self.serving(), self.desired.spec.autoscaling.init_replicas
        actions = plan([self.desired], self.replicas.values(), preparations, 0.0)
        for action in actions:
            self.apply(action)
        assert self.serving() >= min(before, wanted)
        stuck = [item for item in self.replicas.values() if item.is_stuck and self.is_newest(item)]
        assert len(stuck) <= 1
        return actions

    def apply(self, action: ReplicaAction) -> None:
        match action:
            case Prepare(wanted):
                self.prepared.add(wanted.hash)
            case Start(wanted):
                self.serial += 1
                name = f"{self.serial:04d}"
                self.replicas[name] = replica(name, STARTING, revision=wanted.hash, started_at=self.serial)
            case Retire(name):
                del self.replicas[name]
            case Promote(wanted):
                self.desired = replace(self.desired, serving=wanted, failure=None)

    def is_newest(self, item: Replica) -> bool:
        return item.spec.revision == self.desired.revision

    def deploy(self, revision: str, count: int) -> None:
        self.desired = replace(self.desired, target=deployed(revision, api(replicas=count)))

    def finish_starts(self, limit: int) -> None:
        for item in [item for item in self.replicas.values() if not item.is_ready][:limit]:
            self.settle(item)

    def settle(self, item: Replica) -> None:
        outcome = FAILED if item.spec.revision in self.broken else READY
        self.become(item, outcome.state, failed_starts=outcome.failed_starts, failure=outcome.failure)

    def become(self, item: Replica, state: ProcessState, **changes: object) -> None:
        old = item.status.processes[0]
        process = replace(old, state=state, **changes)  # type: ignore[arg-type]
        processes = tuple(process if other is old else other for other in item.status.processes)
        status = replace(item.status, processes=processes)
        self.replicas[item.spec.id] = Replica(item.spec, status)

    def crash(self, position: int) -> None:
        ready = [item for item in self.replicas.values() if item.is_ready]
        if ready:
            item = ready[position % len(ready)]
            self.become(item, ProcessState.STARTING, restarts=item.status.processes[0].restarts + 1)

    def vanish(self, position: int) -> None:
        if self.replicas:
            del self.replicas[sorted(self.replicas)[position % len(self.replicas)]]


revisions = st.sampled_from(["r1", "r2", "r3"])
events = st.one_of(
    st.tuples(st.just("deploy"), revisions, st.integers(1, 5)),
    st.tuples(st.just("finish"), st.integers(1, 5)),
    st.tuples(st.just("crash"), st.integers(0, 9)),
    st.tuples(st.just("vanish"), st.integers(0, 9)),
    st.tuples(st.just("act")),
)


@settings(max_examples=3 * settings().max_examples)
@given(st.lists(events, max_size=30), st.sets(revisions))
def test_no_sequence_of_events_reduces_ready_replicas_and_every_sequence_converges(
    history: list[tuple[str, ...]], broken: set[str]
) -> None:
    world = World(record(deployed("r1", api(replicas=2))), broken=broken)
    for name, *arguments in history:
        match name:
            case "deploy":
                world.deploy(*arguments)  # type: ignore[arg-type]
            case "finish":
                world.finish_starts(*arguments)  # type: ignore[arg-type]
            case "crash":
                world.crash(*arguments)  # type: ignore[arg-type]
            case "vanish":
                world.vanish(*arguments)  # type: ignore[arg-type]
        world.act()
    for _ in range(60):
        world.finish_starts(99)
        if not world.act() and all(item.is_ready or item.has_failed for item in world.replicas.values()):
            break
    else:
        raise AssertionError("does not come to rest")
    check_at_rest(world)


def check_at_rest(world: World) -> None:
    wanted = world.desired.spec.autoscaling.init_replicas
    newest = [item for item in world.replicas.values() if world.is_newest(item)]
    if world.desired.revision not in world.broken:
        assert len(world.replicas) == wanted == world.serving()
        assert len(newest) == wanted
        return
    assert len([item for item in newest if item.has_failed]) == 1
    serving = world.desired.serving
    if serving and serving.hash not in world.broken:
        assert world.serving() == wanted


@pytest.mark.parametrize("state", [ProcessState.BACKING_OFF, ProcessState.STARTING])
def test_keeps_a_replica_that_repeatedly_crashes_after_it_served(state: ProcessState) -> None:
    desired = record(deployed(spec=api(replicas=2)), deployed(spec=api(replicas=2)))
    dying = [replica(name, process(state=state, restarts=5)) for name in "ab"]
    assert decide(desired, dying) == []


def test_a_traffic_splitter_needs_no_preparation() -> None:
    split = Api.model_validate({"name": "iris", "kind": "TrafficSplitter", "apis": [{"name": "one", "weight": 100}]})
    newest = deployed(spec=split)
    assert plan([record(newest)], [], {}, 0.0) == [Promote(newest)]
    assert plan([record(newest, newest)], [], {}, 0.0) == []


def test_an_unproven_revision_gets_one_replica_even_at_zero_desired_replicas() -> None:
    newest = deployed("r2", api(autoscaling={"min_replicas": 0}))
    idle = record(newest, newest, replicas=0)
    assert wanted_replicas(idle) == 0
    assert wanted_replicas(replace(idle, serving=deployed("r1"))) == 1
    # Requests are answered with the failure instead of being held, so none of them would wake it up.
    assert wanted_replicas(replace(idle, failure=StoredFailure("ValueError: bad weights"))) == 1


def tried(desired: ApiRecord, replicas: list[Replica], percent: int = 10) -> list[ReplicaAction]:
    """Plan while the newest revision is a canary."""
    states = {("iris", revision): DONE for revision in ("r1", "r2")}
    return plan([desired], replicas, states, 0.0, canaries={"iris": percent})


def test_a_canary_has_the_replicas_of_its_share_in_addition_to_the_old_ones() -> None:
    desired = record(deployed("r2", api(replicas=8)), deployed("r1", api(replicas=8)))
    old = [replica(f"o{number}") for number in range(8)]
    assert started(tried(desired, old)) == ["r2"]
    assert started(tried(desired, old, percent=50)) == ["r2"] * 4
    new = [replica(f"n{number}", revision="r2") for number in range(4)]
    assert tried(desired, [*old, *new], percent=50) == []


def test_a_canary_is_not_promoted_before_its_trial_ends() -> None:
    desired = record(deployed("r2"), deployed("r1"))
    replicas = [replica("old"), replica("new", revision="r2")]
    assert tried(desired, replicas) == []
    assert decide(desired, replicas) == [Promote(deployed("r2")), Retire("old")]


def test_an_old_replica_lost_during_a_trial_is_replaced() -> None:
    desired = record(deployed("r2", api(replicas=2)), deployed("r1", api(replicas=2)))
    replicas = [replica("old"), replica("new", revision="r2")]
    assert started(tried(desired, replicas)) == ["r1"]


def test_an_api_without_requests_has_one_replica_of_each_revision_during_a_trial() -> None:
    spec = api(replicas=0)
    desired = record(deployed("r2", spec), deployed("r1", spec), replicas=0)
    assert started(tried(desired, [])) == ["r2", "r1"]


def test_a_canary_that_fails_is_kept_once_and_the_old_replicas_stay() -> None:
    desired = record(deployed("r2"), deployed("r1"))
    assert tried(desired, [replica("old"), replica("new", FAILED, revision="r2")]) == []


def test_a_canary_that_returns_is_retired() -> None:
    desired = record(deployed("r1"), deployed("r1"))
    assert retired(decide(desired, [replica("old"), replica("new", revision="r2")])) == ["new"]
