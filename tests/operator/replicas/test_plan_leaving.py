"""Planning with replicas that must leave their place but serve until replaced."""

from __future__ import annotations

from dataclasses import replace

from cortex.operator.replicas.plan import Replica, ReplicaAction, Retire, Start, plan
from cortex.operator.revisions.preparation_states import Preparation, Stage
from harness.replicas.fleet import STARTING, api, deployed, record, replica

NEWEST = deployed(spec=api(replicas=2))


def decide(*replicas: Replica) -> list[ReplicaAction]:
    return plan([record(NEWEST, NEWEST)], replicas, {("iris", "r1"): Preparation(Stage.DONE)}, 0.0)


def leaving(name: str) -> Replica:
    stays = replica(name)
    return Replica(stays.spec, replace(stays.status, is_leaving=True))


def test_starts_a_replacement_before_it_retires_a_leaving_replica() -> None:
    assert decide(replica("a"), leaving("b")) == [Start(NEWEST)]
    assert decide(replica("a"), leaving("b"), replica("c", STARTING)) == []
    assert decide(replica("a"), leaving("b"), replica("c")) == [Retire("b")]


def test_keeps_a_replica_that_no_longer_leaves_and_retires_the_replacement() -> None:
    assert decide(replica("a"), replica("b"), replica("c", STARTING)) == [Retire("c")]


def test_replaces_all_leaving_replicas_within_max_surge() -> None:
    assert decide(leaving("a"), leaving("b")) == [Start(NEWEST)]
