"""Replicas whose place is not their own any more: they serve until others do."""

from __future__ import annotations

from dataclasses import replace

from cortex.operator.replicas.plan import Preparation, Replica, ReplicaAction, Retire, Stage, Start, plan
from harness.replicas.fleet import STARTING, api, record, replica, target

NEWEST = target(spec=api(replicas=2))


def decide(*replicas: Replica) -> list[ReplicaAction]:
    return plan([record(NEWEST, NEWEST)], replicas, {("iris", "r1"): Preparation(Stage.DONE)}, 0.0)


def leaving(name: str) -> Replica:
    stays = replica(name)
    return Replica(stays.spec, replace(stays.status, is_leaving=True))


def test_another_is_started_before_one_that_leaves_goes() -> None:
    assert decide(replica("a"), leaving("b")) == [Start(NEWEST)]
    assert decide(replica("a"), leaving("b"), replica("c", STARTING)) == []
    assert decide(replica("a"), leaving("b"), replica("c")) == [Retire("b")]


def test_one_whose_place_is_its_own_again_stays_and_the_other_goes() -> None:
    assert decide(replica("a"), replica("b"), replica("c", STARTING)) == [Retire("c")]


def test_all_that_leave_are_replaced_within_the_surge() -> None:
    assert decide(leaving("a"), leaving("b")) == [Start(NEWEST)]
