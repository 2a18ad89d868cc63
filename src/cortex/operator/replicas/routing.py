"""Turns desired APIs and running replicas into the gateway's routing table. Pure; knows nothing of HAProxy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cortex.gateway.routes import ApiKey, Backend, RoutingTable, Server, Share, Split
from cortex.lifecycle import ApiKind, ProcessState
from cortex.operator.replicas.plan import Preparation, Preparations, Replica, is_restarting
from cortex.operator.replicas.status import failure_of
from cortex.replica.spec import ProcessStatus
from cortex.state.apis import ApiRecord

#: Requests that wait in the socket of an API's only process, where they would wait in the gateway otherwise: both then
#: wake up for many at once, which saves a tenth of their CPU time.
_AHEAD_OF_ONLY_PROCESS = 15
#: They only do so where an API allows so many in a process: fewer would be missed in its queue.
_ROOMY = 256
#: Lent connections are rounded up to a multiple of it, so that one slow client more changes nothing.
_LENT_STEP = 8
#: What callers read while nothing answers and nothing is wrong.
_STARTING = "starting"


def routes_of(
    records: Iterable[ApiRecord],
    replicas: Iterable[Replica],
    preparations: Preparations,
    jobs_socket: str = "",
    keys: Iterable[ApiKey] = (),
    gateways: int = 1,
) -> RoutingTable:
    """Return the table for `replicas`, which are those that take new requests: none that is being stopped.

    All but realtime APIs lead to the operator itself, at `jobs_socket`. `keys` are those of callers. `gateways` serve
    the table alike, and each knows of its own requests only.
    """
    wanted = sorted(records, key=lambda record: record.name)
    by_api: dict[str, list[Replica]] = {}
    for replica in replicas:
        by_api.setdefault(replica.spec.api, []).append(replica)
    return RoutingTable(
        tuple(
            _backend(
                record,
                sorted(by_api.get(record.name, []), key=lambda replica: replica.spec.id),
                preparations.get((record.name, record.revision), Preparation()),
                gateways,
            )
            if record.spec.kind is ApiKind.REALTIME
            else _jobs_backend(record, jobs_socket)
            for record in wanted
            if record.spec.kind is not ApiKind.SPLITTER
        ),
        tuple(_split(record) for record in wanted if record.spec.kind is ApiKind.SPLITTER),
        tuple(keys),
    )


def server_name(replica_id: str, process: int) -> str:
    """Return the name of a replica's process in the gateway; it never changes."""
    return f"{replica_id}-{process}"


def capacity(slots: int, lent: int, limit: int, only_process: bool, gateways: int = 1) -> int:
    """Return how many requests a gateway may have open at a process that runs `slots` at once.

    A few more than run, or the process idles for a round trip after each, but few: they could not go to another
    process that is free earlier. Those lent to slow clients, who hold a connection and no slot, come on top. `limit` is
    the API's own bound on requests inside one process.

    Several gateways share out that bound, and what is ahead. Each may fill all slots by itself, as callers may all come
    to one; and lends as many connections as there are lent, as those may all be its own.
    """
    ahead = _AHEAD_OF_ONLY_PROCESS if only_process else min(slots, 4) + 1
    running = min(slots + _share(ahead, gateways), max(_share(limit, gateways), 1))
    if not lent:
        return running
    spare = lent + max(4, lent // 2)
    return running + -(-spare // _LENT_STEP) * _LENT_STEP


def _share(number: int, gateways: int) -> int:
    return -(-number // gateways)


def _backend(record: ApiRecord, replicas: Sequence[Replica], preparation: Preparation, gateways: int) -> Backend:
    spec = record.spec
    limit = max(1, spec.autoscaling.max_replica_concurrency // spec.handler.processes_per_replica)
    routed = _routed(replicas)
    unavailable = _unavailable(record, replicas, preparation)
    only_process = len(routed) == 1 and limit >= _ROOMY
    # The same for any number of replicas: another bound makes the gateway load its configuration anew.
    slots = max((replica.status.slots for replica, _ in routed), default=spec.handler.threads_per_process)
    inside = capacity(slots, 0, limit, limit >= _ROOMY, gateways)
    return Backend(
        api=record.name,
        endpoint=spec.networking.endpoint,
        timeout_s=spec.networking.timeout_s,
        max_body_bytes=spec.networking.max_body_size,
        max_queue=max(0, _share(limit, gateways) - inside),
        unavailable=unavailable or _STARTING,
        servers=tuple(
            Server(
                name=server_name(replica.spec.id, process.index),
                socket=process.socket,
                capacity=capacity(replica.status.slots, process.lent, limit, only_process, gateways),
                near=process.near,
            )
            for replica, process in routed
        ),
        # Where the first replica can't come, callers are told at once instead of after their time.
        holds=spec.autoscaling.min_replicas == 0 and not unavailable,
        access_log=spec.networking.access_log,
        needs_key=spec.networking.needs_key,
    )


def _jobs_backend(record: ApiRecord, socket: str) -> Backend:
    networking = record.spec.networking
    return Backend(
        api=record.name,
        endpoint=networking.endpoint,
        timeout_s=networking.timeout_s,
        max_body_bytes=networking.max_body_size,
        max_queue=0,
        unavailable="",
        jobs_socket=socket,
        access_log=networking.access_log,
        needs_key=networking.needs_key,
    )


def _split(record: ApiRecord) -> Split:
    targets = record.spec.apis or []
    shares = tuple(Share(target.name, target.weight) for target in targets if not target.shadow)
    shadow = next((Share(target.name, target.weight) for target in targets if target.shadow), None)
    return Split(record.name, record.spec.networking.endpoint, shares, shadow, record.spec.networking.needs_key)


def _routed(replicas: Sequence[Replica]) -> list[tuple[Replica, ProcessStatus]]:
    every = [(replica, process) for replica in replicas for process in replica.status.processes if process.socket]
    ready = [pair for pair in every if pair[1].state is ProcessState.READY]
    # Where nothing else answers, requests wait in the socket of a process that is being started again: the
    # supervisor holds it open, and a restart is faster than a caller's retry.
    return ready or [pair for pair in every if is_restarting(pair[1])]


def _unavailable(record: ApiRecord, replicas: Sequence[Replica], preparation: Preparation) -> str:
    """Say why no replica can come; empty if one can."""
    failure = failure_of(record, (r for r in replicas if r.spec.revision == record.revision), preparation)
    return failure.message if failure else preparation.lack
