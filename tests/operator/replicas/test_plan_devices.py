from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cortex.config.schema import Compute
from cortex.engine.devices import Inventory, assign
from cortex.errors import ComputeUnavailableError
from cortex.lifecycle import ApiStatus
from cortex.operator.replicas.plan import Promote, Replica, ReplicaAction, Retire, Start, plan
from cortex.operator.replicas.routing import routes_of
from cortex.operator.replicas.status import shortage_of, status_of
from cortex.operator.revisions.capacity import DeviceCapacity
from cortex.operator.revisions.preparation_states import Preparation, Stage
from cortex.state.queries.apis import ApiRecord, StoredFailure
from cortex.state.revision import Revision
from cortex.worker.spec import ProcessStatus
from harness.replicas.fleet import FAILED, READY, STARTING, api, deployed, record, replica

DONE = Preparation(Stage.DONE)


def wanting(revision: str, gpu: int = 1, replicas: int = 1) -> Revision:
    return deployed(revision, api(replicas=replicas, compute={"gpu": gpu}))


def holding(id: str, gpus: int, *processes: ProcessStatus, revision: str = "r1", name: str = "iris") -> Replica:
    found = replica(id, *processes, revision=revision, name=name)
    ids = tuple(f"GPU-of-{id}-{number}" for number in range(gpus))
    return Replica(replace(found.spec, gpu=gpus, gpu_ids=ids), found.status)


def decide(desired: ApiRecord, replicas: list[Replica], free: int) -> list[ReplicaAction]:
    preparations = {("iris", revision): DONE for revision in ("r1", "r2")}
    return plan([desired], replicas, preparations, 0.0, DeviceCapacity(gpus=free, total_gpus=8))


def test_starts_only_as_many_replicas_as_gpus_are_free() -> None:
    desired = record(wanting("r1", gpu=2, replicas=3))
    assert len(decide(desired, [], free=5)) == 2
    assert decide(desired, [], free=1) == []


def test_an_update_with_a_free_gpu_starts_the_new_replica_first() -> None:
    desired = record(wanting("r2"), wanting("r1"))
    assert decide(desired, [holding("old", 1)], free=1) == [Start(desired.target)]


def test_an_update_without_a_free_gpu_retires_only_as_many_old_replicas_as_necessary() -> None:
    desired = record(wanting("r2", replicas=2), wanting("r1", replicas=2))
    actions = decide(desired, [holding("a", 1), holding("b", 1)], free=0)
    assert actions == [Retire("b"), Start(desired.target)]
    starting = holding("new", 1, STARTING, revision="r2")
    assert decide(desired, [holding("a", 1), starting], free=0) == []
    ready = holding("new", 1, READY, revision="r2")
    assert decide(desired, [holding("a", 1), ready], free=0) == [Retire("a"), Start(desired.target)]


def test_an_update_to_more_gpus_per_replica_retires_several_old_replicas() -> None:
    desired = record(wanting("r2", gpu=2), wanting("r1", replicas=2))
    actions = decide(desired, [holding("a", 1), holding("b", 1)], free=0)
    assert actions == [Retire("a"), Retire("b"), Start(desired.target)]


def test_retires_no_old_replica_if_the_new_one_would_still_not_fit() -> None:
    desired = record(wanting("r2", gpu=2), wanting("r1"))
    assert decide(desired, [holding("a", 1)], free=0) == []
    held = {("iris", "r2"): replace(DONE, hold_until=9.0)}
    assert (
        plan([record(wanting("r2"), wanting("r1"))], [holding("a", 1)], held, 0.0, DeviceCapacity(total_gpus=1)) == []
    )


def test_a_failed_revision_releases_its_gpu_to_the_previous_one() -> None:
    desired = record(wanting("r2"), wanting("r1"), failure=StoredFailure("ValueError: bad weights", ""))
    failing = holding("new", 1, FAILED, revision="r2")
    assert decide(desired, [failing], free=0) == [Retire("new"), Start(wanting("r1"))]
    assert decide(desired, [holding("old", 1)], free=0) == []


def test_a_failed_revision_that_blocks_nothing_keeps_retrying() -> None:
    desired = record(wanting("r2"), wanting("r1"), failure=StoredFailure("ValueError: bad weights", ""))
    assert decide(desired, [holding("old", 1), holding("new", 1, FAILED, revision="r2")], free=0) == []


def test_a_gpu_released_by_an_update_goes_to_no_other_api() -> None:
    updating = record(wanting("r2"), wanting("r1"))
    other = Revision("r1", api("another", compute={"gpu": 1}), "project")
    waiting = [
        record(other),
        record(replace(other, spec=api("a", replicas=2, compute={"gpu": 1})), deployed("r1")),
    ]
    preparations = {(name, revision): DONE for name in ("another", "iris", "a") for revision in ("r1", "r2")}
    replicas = [holding("a1", 1, name="a")]
    actions = plan([*waiting, updating], replicas, preparations, 0.0, DeviceCapacity(gpus=1, total_gpus=2))
    assert [action for action in actions if isinstance(action, Start)] == [Start(updating.target)]


def test_an_api_without_gpus_has_no_shortage() -> None:
    assert decide(record(deployed("r1")), [], free=0) == [Start(deployed("r1"))]
    assert DeviceCapacity(gpus=-1).fits(Compute())


def state(desired: ApiRecord, replicas: list[Replica], room: DeviceCapacity) -> tuple[ApiStatus, str]:
    preparation = replace(DONE, shortage=shortage_of(desired, replicas, room))
    found = status_of(desired, [r for r in replicas if r.spec.api == "iris"], [], preparation, desired.updated_at)
    (backend,) = routes_of([desired], [], {("iris", desired.revision): preparation}).backends
    return found.status, found.failure.message if found.failure else backend.unavailable


def test_an_api_without_a_free_gpu_is_stalled_with_the_reason() -> None:
    desired = record(wanting("r1"))
    others = [holding("other", 1, name="other")]
    message = "a replica needs 1 GPU, but none of this machine's 1 is free; it starts once there is capacity"
    assert state(desired, others, DeviceCapacity(total_gpus=1)) == (ApiStatus.STALLED, message)
    assert state(desired, others, DeviceCapacity())[1] == "a replica needs 1 GPU, but this machine has none"


def test_an_api_whose_own_older_replicas_hold_the_gpus_is_updating() -> None:
    desired = record(wanting("r2"), wanting("r1"))
    assert state(desired, [holding("old", 1)], DeviceCapacity(total_gpus=1)) == (ApiStatus.UPDATING, "starting")


def test_an_api_with_all_replicas_running_has_no_shortage() -> None:
    desired = record(wanting("r1"))
    assert state(desired, [holding("a", 1, STARTING)], DeviceCapacity(total_gpus=1)) == (ApiStatus.UPDATING, "starting")


# Random sequences of events on a machine with few GPUs, which retired replicas hold for a while.


@dataclass
class Machine:
    """Applies actions like the reconciler and the engine."""

    desired: ApiRecord
    inventory: Inventory
    broken: set[str]
    running: dict[str, Replica] = field(default_factory=dict)
    leaving: dict[str, Replica] = field(default_factory=dict)
    serial: int = 0

    def act(self) -> bool:
        """Make one pass; tell whether it changed anything."""
        preparations = {("iris", f"r{number}-{gpu}"): DONE for number in (1, 2, 3) for gpu in (0, 1, 2)}
        room = DeviceCapacity.of(self.inventory, [item.spec for item in self.running.values()])
        before = set(self.running), self.desired
        for action in plan([self.desired], list(self.running.values()), preparations, 0.0, room):
            match action:
                case Start(wanted):
                    self.start(wanted)
                case Retire(name):
                    self.leaving[name] = self.running.pop(name)
                case Promote(wanted):
                    self.desired = replace(self.desired, serving=wanted, failure=None)
        if any(item.has_failed for item in self.newest()):
            self.desired = replace(self.desired, failure=StoredFailure("bad", ""))
        return before != (set(self.running), self.desired)

    def start(self, wanted: Revision) -> None:
        self.serial += 1
        made = replica(f"{self.serial:04d}", STARTING, revision=wanted.hash, started_at=self.serial)
        spec = replace(made.spec, gpu=wanted.spec.compute.gpu)
        held = [item.spec for item in [*self.running.values(), *self.leaving.values()]]
        try:
            self.running[spec.id] = Replica(assign(spec, self.inventory, held), made.status)
        except ComputeUnavailableError:
            assert self.leaving, "planned a replica that has no room"

    def settle(self) -> None:
        for name, item in self.running.items():
            if not item.is_ready:
                end = FAILED if item.spec.revision in self.broken else READY
                self.running[name] = Replica(item.spec, replace(item.status, processes=(end,)))

    def newest(self) -> list[Replica]:
        return [item for item in self.running.values() if item.spec.revision == self.desired.revision]


revisions = st.sampled_from(["r1", "r2", "r3"])
events = st.one_of(
    st.tuples(st.just("deploy"), revisions, st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("settle")),
    st.tuples(st.just("gone")),
    st.tuples(st.just("act")),
)


@settings(max_examples=3 * settings().max_examples)
@given(st.lists(events, max_size=20), st.sets(revisions), st.integers(0, 4))
@example([("deploy", "r1", 1, 1), ("settle",), ("deploy", "r2", 1, 1)], {"r2"}, 1)
@example([("settle",), ("settle",), ("deploy", "r2", 1, 2)], {"r2"}, 0)
@example([("deploy", "r2", 2, 1), ("settle",), ("deploy", "r1", 1, 2)], {"r1"}, 4)
def test_no_sequence_of_events_gets_stuck_for_lack_of_gpus(
    history: list[tuple[object, ...]], broken: set[str], gpus: int
) -> None:
    inventory = Inventory(tuple(f"GPU-{number}" for number in range(gpus)))
    # The compute of a replica is part of its revision; the number of replicas is not.
    broken = {f"{name}-{gpu}" for name in broken for gpu in (0, 1, 2)}
    machine = Machine(record(wanting("r1-0", gpu=0)), inventory, broken)
    for name, *arguments in history:
        if name == "deploy":
            revision, gpu, count = arguments
            newest = wanting(f"{revision}-{gpu}", int(f"{gpu}"), int(f"{count}"))
            if newest.hash == machine.desired.revision:
                continue
            machine.desired = replace(machine.desired, target=newest, failure=None)
        elif name == "settle":
            machine.settle()
        elif name == "gone":
            machine.leaving.clear()
        machine.act()
    for _ in range(60):
        machine.settle()
        machine.leaving.clear()
        if not machine.act() and all(item.is_ready or item.has_failed for item in machine.running.values()):
            break
    else:
        raise AssertionError("does not come to rest")
    check_at_rest(machine)


def check_at_rest(machine: Machine) -> None:
    spec = machine.desired.spec
    wanted, gpu, gpus = spec.autoscaling.init_replicas, spec.compute.gpu, len(machine.inventory.gpus)
    ready = [item for item in machine.newest() if item.is_ready]
    if machine.desired.revision not in machine.broken and gpu * wanted <= gpus:
        assert len(ready) == len(machine.running) == wanted
    serving = machine.desired.serving
    if machine.desired.revision in machine.broken and serving and serving.hash != machine.desired.revision:
        # Replicas of a revision that was superseded during its rollout serve beside it.
        back = [item for item in machine.running.values() if item.is_ready and item not in machine.newest()]
        needed = serving.spec.compute.gpu
        count = min(wanted, serving.spec.autoscaling.init_replicas)  # its own number of replicas
        assert len(back) >= min(count, gpus // needed if needed else count)
