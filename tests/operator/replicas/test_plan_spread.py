"""Replicas of an API stay spread over nodes: through replacements, scaling and updates, and with lost reservations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from cortex.cluster.placement import ClusterResources, NodeResources, Occupant, Resources, choose_node
from cortex.operator.replicas.plan import Replica, ReplicaAction, Retire, Start, plan
from cortex.operator.revisions.preparation_states import Preparation, Stage
from cortex.state.queries.apis import ApiRecord
from harness.replicas.fleet import STARTING, api, deployed, record, replica

DONE = {("iris", name): Preparation(Stage.DONE) for name in ("r1", "r2", "r3")}
NODES = "abc"


def on(node: str, each: Replica, is_unreserved: bool = False) -> Replica:
    return Replica(each.spec, replace(each.status, node=node, is_unreserved=is_unreserved))


def decide(desired: ApiRecord, *replicas: Replica) -> list[ReplicaAction]:
    return plan([desired], replicas, DONE, 0.0)


def steady(count: int) -> ApiRecord:
    newest = deployed(spec=api(replicas=count))
    return record(newest, newest)


def test_surplus_replicas_are_retired_on_the_fullest_node() -> None:
    running = [
        on(node, replica(name, started_at=age)) for age, (name, node) in enumerate(zip("wxyz", "aaab", strict=True))
    ]
    assert decide(steady(3), *running) == [Retire("y")]
    assert decide(steady(2), *running) == [Retire("x"), Retire("y")]


def test_replacements_with_a_reservation_stay_and_returned_replicas_without_one_go() -> None:
    back, new = on("a", replica("back"), is_unreserved=True), on("b", replica("new", started_at=9))
    assert decide(steady(1), back, new) == [Retire("back")]


def test_a_returned_replica_without_a_reservation_serves_until_its_replacement_is_ready() -> None:
    back, new = on("a", replica("back"), is_unreserved=True), on("b", replica("new", STARTING, started_at=9))
    assert decide(steady(1), back, new) == []
    assert decide(steady(1), on("a", back), new) == [Retire("new")]


@dataclass
class Cluster:
    """Nodes with enough room, and the replicas of one API on them."""

    desired: ApiRecord = field(default_factory=lambda: steady(2))
    up: set[str] = field(default_factory=lambda: set(NODES))
    replicas: list[Replica] = field(default_factory=list)
    started: int = 0

    def settle(self) -> None:
        for _ in range(100):
            actions = [each for each in decide(self.desired, *self.replicas) if isinstance(each, Start | Retire)]
            if not actions:
                return
            for action in actions:
                if isinstance(action, Retire):
                    self.replicas = [each for each in self.replicas if each.spec.id != action.replica_id]
                else:
                    self.start(action.revision.hash)
        raise AssertionError("the plan never settles")

    def start(self, revision: str) -> None:
        self.started += 1
        resources = {node: NodeResources(node, 100, 0, 0) for node in sorted(self.up)}
        occupants = [
            Occupant(each.status.node, Resources(1), True, each.spec.revision == revision) for each in self.replicas
        ]
        node = choose_node(Resources(1), ClusterResources(nodes=resources), occupants)
        self.replicas.append(on(node, replica(f"n{self.started}", revision=revision, started_at=self.started)))

    def deploy(self, revision: str) -> None:
        self.desired = record(deployed(revision, self.desired.spec), self.desired.target)

    def scale(self, count: int) -> None:
        newest = deployed(self.desired.revision, api(replicas=count))
        self.desired = record(newest, newest)

    def lose(self, node: str) -> None:
        if self.up != {node}:
            self.up.discard(node)
            self.replicas = [each for each in self.replicas if each.status.node != node]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("scale"), st.integers(1, 7)),
            st.tuples(st.just("deploy"), st.sampled_from(["r1", "r2", "r3"])),
            st.tuples(st.just("lose"), st.sampled_from(NODES)),
            st.tuples(st.just("return"), st.sampled_from(NODES)),
        ),
        max_size=12,
    )
)
def test_the_replicas_of_an_api_never_crowd_a_node_while_others_are_as_free(steps: list[tuple[str, object]]) -> None:
    cluster = Cluster()
    cluster.settle()
    is_changed = False  #: a node came back: the replicas that run are not moved to it
    for name, argument in steps:
        match name, argument:
            case "scale", int(count):
                cluster.scale(count)
            case "deploy", str(revision):
                cluster.deploy(revision)
            case "lose", str(node):
                cluster.lose(node)
            case "return", str(node):
                is_changed = is_changed or node not in cluster.up
                cluster.up.add(node)
        cluster.settle()
        counts = Counter(dict.fromkeys(cluster.up, 0))
        counts.update(each.status.node for each in cluster.replicas)
        if not is_changed:
            assert max(counts.values()) - min(counts.values()) <= 1, counts
        assert len(cluster.replicas) == sum(counts.values())
