"""Turns desired APIs and running replicas into the gateway's routing table. Pure; knows nothing of HAProxy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cortex.control.plan import Preparation, Preparations, Replica, is_restarting
from cortex.control.status import failure_of
from cortex.gateway.routes import Backend, RoutingTable, Server
from cortex.lifecycle import ProcessState
from cortex.replica.spec import ProcessStatus
from cortex.state.apis import ApiRecord

#: Requests that wait in the socket of an API's only process, where they would wait in the gateway otherwise: both then
#: wake up for many at once, which saves a tenth of their CPU time.
_AHEAD_OF_ONLY_PROCESS = 15
#: Lent connections are rounded up to a multiple of it, so that one slow client more changes nothing.
_LENT_STEP = 8


def routes_of(records: Iterable[ApiRecord], replicas: Iterable[Replica], preparations: Preparations) -> RoutingTable:
    """Return the table for `replicas`, which are those that take new requests: none that is being stopped."""
    by_api: dict[str, list[Replica]] = {}
    for replica in replicas:
        by_api.setdefault(replica.spec.api, []).append(replica)
    return RoutingTable(
        tuple(
            _backend(
                record,
                sorted(by_api.get(record.name, []), key=lambda replica: replica.spec.id),
                preparations.get((record.name, record.revision), Preparation()),
            )
            for record in sorted(records, key=lambda record: record.name)
        )
    )


def server_name(replica_id: str, process: int) -> str:
    """Return the name of a replica's process in the gateway; it never changes."""
    return f"{replica_id}-{process}"


def capacity(slots: int, lent: int, limit: int, only_process: bool) -> int:
    """Return how many requests the gateway may have open at a process that runs `slots` at once.

    A few more than run, or the process idles for a round trip after each, but few: they could not go to another
    process that is free earlier. Those lent to slow clients, who hold a connection and no slot, come on top. `limit` is
    the API's own bound on requests inside one process.
    """
    ahead = _AHEAD_OF_ONLY_PROCESS if only_process else min(slots, 4) + 1
    running = min(slots + ahead, max(limit, 1))
    if not lent:
        return running
    spare = lent + max(4, lent // 2)
    return running + -(-spare // _LENT_STEP) * _LENT_STEP


def _backend(record: ApiRecord, replicas: Sequence[Replica], preparation: Preparation) -> Backend:
    spec = record.spec
    limit = max(1, spec.autoscaling.max_replica_concurrency // spec.handler.processes_per_replica)
    routed = _routed(replicas)
    only_process = len(routed) == 1
    inside = max((capacity(replica.status.slots, 0, limit, only_process) for replica, _ in routed), default=1)
    return Backend(
        api=record.name,
        endpoint=spec.networking.endpoint,
        timeout_s=spec.networking.timeout_s,
        max_body_bytes=spec.networking.max_body_size,
        max_queue=max(0, limit - inside),
        unavailable=_unavailable(record, replicas, preparation),
        servers=tuple(
            Server(
                name=server_name(replica.spec.id, process.index),
                socket=process.socket,
                capacity=capacity(replica.status.slots, process.lent, limit, only_process),
            )
            for replica, process in routed
        ),
    )


def _routed(replicas: Sequence[Replica]) -> list[tuple[Replica, ProcessStatus]]:
    every = [(replica, process) for replica in replicas for process in replica.status.processes]
    ready = [pair for pair in every if pair[1].state is ProcessState.READY]
    # Where nothing else answers, requests wait in the socket of a process that is being started again: the
    # supervisor holds it open, and a restart is faster than a caller's retry.
    return ready or [pair for pair in every if is_restarting(pair[1])]


def _unavailable(record: ApiRecord, replicas: Sequence[Replica], preparation: Preparation) -> str:
    failure = failure_of(record, (r for r in replicas if r.spec.revision == record.revision), preparation)
    return failure.message if failure else preparation.lack or "starting"
