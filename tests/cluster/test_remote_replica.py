"""Retries of a replica whose place was lost before it started there."""

from __future__ import annotations

from cortex.cluster.remote_replica import RemoteReplica
from cortex.engine.local import first_status
from harness.replicas.specs import replica_spec

SPEC = replica_spec()
REASON = "node 10.0.0.3: the operator is cortex 2 and the Python of Ray has 1 there"


def remote() -> RemoteReplica:
    return RemoteReplica(SPEC, first_status(SPEC, 0))


def test_the_first_loss_is_retried_at_once_and_not_reported() -> None:
    it = remote()
    it.lost(REASON, now=100.0)
    assert it.status.lack == ""
    assert it.is_due(100.0)
    assert not it.is_due(100.0), "it is asked for once"


def test_further_losses_are_reported_and_retried_with_backoff() -> None:
    it, due_after = remote(), []
    for _ in range(10):
        it.lost(REASON, now=100.0)
        due_after.append(next(wait for wait in range(100) if it.is_due(100.0 + wait)))
    assert due_after == [0, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert it.status.lack == REASON


def test_a_new_place_clears_the_problem() -> None:
    it = remote()
    it.lost(REASON, now=1.0)
    it.lost(REASON, now=1.0)
    it.placed()
    assert (it.status.lack, it.problem, it.is_due(1000.0)) == ("", "", False)


def test_a_newer_status_does_not_reset_leaving() -> None:
    it = remote()
    it.is_leaving = True
    it.update(first_status(SPEC, 7))
    assert it.status.is_leaving
