"""Routes: build the gateway's routing table from desired APIs and running replicas, and publish it.

`routes_of` is pure. `RoutePublisher` applies the tables to the gateway. Neither depends on HAProxy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from cortex.config.schema import COMMAND, REQUEST_HANDLERS, Api, Networking
from cortex.errors import GatewayError
from cortex.gateway.base import Gateway
from cortex.gateway.maps import V2_PATH
from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import COPIES_OF_ALL, ApiBackend, ApiKey, Canary, Cors, RoutingTable, Server, Share, Split
from cortex.lifecycle import ApiKind, ProcessState
from cortex.operator.replicas.plan import Replica, is_proven, is_restarting
from cortex.operator.replicas.status import failure_of
from cortex.operator.revisions.preparation_states import Preparation, PreparationStates, Stage
from cortex.state.queries.apis import ApiRecord
from cortex.telemetry import Logger
from cortex.worker.spec import ProcessStatus

RoutedProcess = tuple[Replica, ProcessStatus]

#: Below the endpoint of an API with a request handler: the inputs of its model.
_SIGNATURE_PATH = "/signature"
#: Requests sent ahead to an API's only process: both sides then wake up once for many requests, which saves a tenth of
#: their CPU time.
_AHEAD_OF_ONLY_PROCESS = 15
#: They are at most this part of the concurrency limit, because they are admitted besides it.
_AHEAD_PART = 16
#: The number of slots lent to slow clients is rounded up to a multiple, so that one more client changes no route.
_LENT_STEP = 8
#: Response message while no replica is ready and there is no failure.
_STARTING = "starting"
#: Delay before a rejected table is applied again.
_RETRY_S = 0.5
#: Failures are reported after this time. A restart of the gateway takes less, and so do several attempts on a machine
#: that is overloaded, where a single one may time out.
FAILING_AFTER_S = 10.0
#: A table not in force after this time is late. Most tables take milliseconds.
LATE_AFTER_S = 0.3


class RouteSettings(NamedTuple):
    """Settings of the routing table that apply to all APIs."""

    gateway_secret: str = ""  #: authenticates the gateway at replicas that it reaches over TCP
    v2_at_root: bool = False  #: gateways also answer the Open Inference Protocol at `/v2`
    connections_per_address: int = 0  #: limit of gateways for one address; 0: each chooses it by its memory


def routes_of(
    records: Iterable[ApiRecord],
    replicas: Iterable[Replica],
    preparations: PreparationStates,
    jobs_socket: str = "",
    keys: Iterable[ApiKey] = (),
    gateways: int = 1,
    routed: Collection[str] = (),
    canaries: Mapping[str, int] = MappingProxyType({}),
) -> RoutingTable:
    """Return the routing table for `replicas`, the replicas that accept new requests.

    Backends of all kinds except realtime APIs, and the documentation of all, lead to the operator, at `jobs_socket`.
    `keys` are the API keys of callers. `gateways` is the number of gateways that serve the table; each one counts only
    its own requests. `routed` are the APIs whose class has routes. `canaries` has the share of the newest revision, in
    percent, of each API whose newest revision is tried.
    """
    wanted = sorted(records, key=lambda record: record.name)
    by_api: dict[str, list[Replica]] = {}
    for replica in replicas:
        by_api.setdefault(replica.spec.api, []).append(replica)
    socket = jobs_socket if any(record.spec.networking.docs for record in wanted) else ""

    def backend(record: ApiRecord) -> ApiBackend:
        own = sorted(by_api.get(record.name, []), key=lambda replica: replica.spec.id)
        answering = _as_answering(record)
        preparation = preparations.get((record.name, answering.revision), Preparation())
        unavailable = _unavailable(answering, own, preparation)
        if record.spec.kind is not ApiKind.REALTIME:
            has_workers = record.spec.kind.has_replicas
            is_ready = any(each.is_ready for each in own) if has_workers else preparation.stage is Stage.DONE
            starting = "" if record.serving else _STARTING
            return _jobs_backend(record, jobs_socket, "" if is_ready else unavailable or starting)
        percent = canaries.get(record.name)
        return _backend(record, own, unavailable, is_proven(answering), gateways, record.name in routed, percent)

    return RoutingTable(
        tuple(backend(record) for record in wanted if record.spec.kind is not ApiKind.SPLITTER),
        tuple(_split(record) for record in wanted if record.spec.kind is ApiKind.SPLITTER),
        tuple(keys),
        operator_socket=socket,
    )


def server_name(replica_id: str, process: int) -> str:
    """Return the stable name of a replica's process in the gateway."""
    return f"{replica_id}-{process}"


def server_capacity(slots: int, lent: int, limit: int, ahead: int = 0, gateways: int = 1) -> int:
    """Return the maximum number of requests that a gateway may have open at a process that runs `slots` at once.

    `ahead` requests more are sent ahead, so that the process does not idle for a round trip after each request.
    Connections lent to slow clients, which occupy no slot, are added, and some in advance for more such clients.
    `limit` is the API's own limit of requests inside one process.

    Several gateways share that limit and the requests ahead. Each one may fill all slots alone, because all callers may
    use the same gateway; for the same reason each one allows for all lent connections.
    """
    running = min(slots + _share(ahead, gateways), max(_share(limit, gateways), 1))
    if not lent:
        return running
    if not ahead:
        return running + lent + max(1, lent // 2)
    spare = lent + max(4, lent // 2)
    return running + -(-spare // _LENT_STEP) * _LENT_STEP


def requests_ahead(slots: int, limit: int, has_short_calls: bool, only_process: bool) -> int:
    """Return the number of requests sent ahead to a process that runs `slots` calls at once.

    A request sent ahead can't move to another process that becomes free earlier. So it is sent only where the calls
    before it are short, and to the only process of an API, which it has to wait for anyway, more of them are sent.
    """
    if not has_short_calls:
        return 0
    return min(_AHEAD_OF_ONLY_PROCESS if only_process else min(slots, 4) + 1, limit // _AHEAD_PART)


def _share(number: int, gateways: int) -> int:
    return -(-number // gateways)


def _backend(
    record: ApiRecord,
    replicas: Sequence[Replica],
    unavailable: str,
    comes_back: bool,
    gateways: int,
    has_routes: bool,
    canary_percent: int | None,
) -> ApiBackend:
    """Return the backend of a realtime API; one that `comes_back` starts again within seconds or minutes."""
    spec = record.spec
    limit = max(1, spec.autoscaling.max_replica_concurrency // spec.handler.processes_per_replica)
    routed = _routed(replicas)
    scales_to_zero = spec.autoscaling.min_replicas == 0
    # Independent of the number of replicas and of requests ahead: a change of the limit makes the gateway reload its
    # configuration.
    default_slots = limit if spec.handler.type in ("asgi", COMMAND) else spec.handler.threads_per_process
    slots = max((replica.status.slots for replica, _ in routed), default=default_slots)
    inside = server_capacity(slots, 0, limit, 0, gateways)
    old, canary = _divided(record, routed, canary_percent)

    def server(replica: Replica, process: ProcessStatus, of: Sequence[RoutedProcess]) -> Server:
        ahead = requests_ahead(replica.status.slots, limit, process.has_short_calls, len(of) == 1)
        return Server(
            name=server_name(replica.spec.id, process.index),
            socket=process.socket,
            capacity=server_capacity(replica.status.slots, process.lent, limit, ahead, gateways),
            near=process.near,
        )

    return ApiBackend(
        api=record.name,
        endpoint=spec.networking.endpoint,
        timeout_s=spec.networking.timeout_s,
        max_body_bytes=spec.networking.max_body_size,
        max_queue=max(0, _share(limit, gateways) - inside),
        subpaths=_subpaths(spec, has_routes),
        unavailable=unavailable or ("" if scales_to_zero and record.serving else _STARTING),
        servers=tuple(server(*pair, old) for pair in old),
        # If the first replica can't start, fail requests at once instead of after their timeout.
        holds=(scales_to_zero or comes_back) and (not unavailable or _was_killed_once(replicas)),
        access_log=spec.networking.access_log,
        needs_key=spec.networking.needs_key,
        cors=_cors(spec.networking),
        has_docs=spec.networking.docs,
        sticky=spec.networking.sticky,
        replica_protocol=_protocol(spec, has_routes),
        finishes_calls=spec.networking.on_disconnect == "finish",
        canary=None if canary is None else _canary(canary[0], [server(*pair, canary[1]) for pair in canary[1]]),
    )


def _canary(percent: int, servers: Iterable[Server]) -> Canary:
    gets_copies = percent == COPIES_OF_ALL
    return Canary(0 if gets_copies else percent, tuple(servers), gets_copies)


def _divided(
    record: ApiRecord, routed: list[RoutedProcess], percent: int | None
) -> tuple[list[RoutedProcess], tuple[int, list[RoutedProcess]] | None]:
    """Return the processes for most requests, and, while the newest revision is tried, its share and its processes.

    If one revision has no process, the other one gets all requests. Those of a revision that was tried before get none.
    """
    if percent is None or record.serving is None:
        return routed, None
    old = [pair for pair in routed if pair[0].spec.revision == record.serving.hash]
    new = [pair for pair in routed if pair[0].spec.revision == record.revision]
    return (old, (percent, new)) if old and new else (old or new or routed, (0, []))


def _protocol(spec: Api, has_routes: bool) -> Protocol:
    if spec.is_grpc:
        return Protocol.GRPC
    if spec.is_application:
        return Protocol.APPLICATION
    if spec.runs_command:
        return Protocol.COMMAND
    return Protocol.ROUTES if has_routes else Protocol.CALLS


def _subpaths(spec: Api, has_routes: bool) -> tuple[str, ...]:
    if spec.is_application or spec.runs_command or spec.is_grpc:
        return ("/",)
    if has_routes:
        return (V2_PATH, "/")
    return (V2_PATH, _SIGNATURE_PATH) if spec.handler.interface in REQUEST_HANDLERS else (V2_PATH,)


def _jobs_backend(record: ApiRecord, socket: str, unavailable: str) -> ApiBackend:
    networking = record.spec.networking
    return ApiBackend(
        api=record.name,
        endpoint=networking.endpoint,
        timeout_s=networking.timeout_s,
        max_body_bytes=networking.max_body_size,
        max_queue=0,
        unavailable=unavailable,
        jobs_socket=socket,
        access_log=networking.access_log,
        needs_key=networking.needs_key,
        cors=_cors(networking),
        has_docs=networking.docs,
    )


def _split(record: ApiRecord) -> Split:
    targets = record.spec.apis or []
    shares = tuple(Share(target.name, target.weight) for target in targets if not target.shadow)
    shadow = next((Share(target.name, target.weight) for target in targets if target.shadow), None)
    networking = record.spec.networking
    return Split(
        record.name,
        networking.endpoint,
        shares,
        shadow,
        networking.needs_key,
        _cors(networking),
        has_docs=networking.docs,
    )


def _cors(networking: Networking) -> Cors | None:
    cors = networking.cors
    return Cors(tuple(cors.origins), tuple(cors.headers), cors.credentials) if cors else None


def _routed(replicas: Sequence[Replica]) -> list[RoutedProcess]:
    every = [(replica, process) for replica in replicas for process in replica.status.processes if process.socket]
    ready = [pair for pair in every if pair[1].state is ProcessState.READY]
    # If no process is ready, requests wait in the socket of a restarting process. The supervisor keeps the socket open,
    # and a restart is faster than a caller's retry.
    return ready or [pair for pair in every if is_restarting(pair[1])]


def _as_answering(record: ApiRecord) -> ApiRecord:
    """Return an API as if the revision that answers next were its newest.

    With replicas, that is the one that has served, until the newest replaces it. Jobs run the newest.
    """
    serving = record.serving
    if serving in (None, record.target) or not record.spec.kind.has_replicas:
        return record
    return replace(record, target=serving, failure=None)


def _unavailable(record: ApiRecord, replicas: Sequence[Replica], preparation: Preparation) -> str:
    """Return the reason that callers get why no replica can become ready; empty if one can."""
    failure = failure_of(record, (r for r in replicas if r.spec.revision == record.revision), preparation)
    return failure.for_callers(record.name) if failure else preparation.shortage


def _was_killed_once(replicas: Sequence[Replica]) -> bool:
    """Return whether processes failed to start only because something killed them, each once: they start again."""
    failed = [each for replica in replicas for each in replica.status.processes if each.failed_starts]
    return bool(failed) and all(
        each.failed_starts == 1 and each.failure is not None and each.failure.was_killed for each in failed
    )


class RoutePublisher:
    """Apply the newest table to the gateway, one at a time; superseded tables are skipped.

    Calls `on_change` each time a table came into force or was rejected.
    """

    def __init__(
        self,
        gateway: Gateway,
        on_change: Callable[[], None],
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._on_change = on_change
        self._logger = logger
        self._clock = clock
        self._due_since: float | None = None  #: time since which a newer table waits
        self._failing_since: float | None = None
        self._error = ""
        self._table: RoutingTable | None = None
        self._routed: frozenset[str] = frozenset()  #: APIs to which the table in force leads
        self._published = 0
        self._applied = 0
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()

    async def startup(self, table: RoutingTable) -> None:
        """Start the gateway with its first table. Raises: GatewayError."""
        await self._gateway.startup(table)
        self._routed = _routed_apis(table)

    def has_routes(self, api: str) -> bool:
        """Return whether the table in force leads the requests of an API anywhere."""
        return api in self._routed

    @property
    def is_settled(self) -> bool:
        """Return whether the newest table is in force."""
        return self._applied == self._published

    @property
    def is_late(self) -> bool:
        """Return whether the newest table has waited longer than usual, or was rejected."""
        if self._failing_since is not None:
            return True
        return self._due_since is not None and self._clock() - self._due_since > LATE_AFTER_S

    @property
    def failure(self) -> str:
        """Return why routes can't come into force, after failing for a while; else empty."""
        is_long = self._failing_since is not None and self._clock() - self._failing_since >= FAILING_AFTER_S
        return self._error if is_long else ""

    def publish(self, table: RoutingTable) -> None:
        """Put `table` in force soon. An unchanged table is ignored."""
        if table != self._table:
            self._table = table
            self.publish_again()

    def publish_again(self) -> None:
        """Apply the newest table again, because the gateway may have lost it."""
        if self._due_since is None:
            self._due_since = self._clock()
        self._published += 1
        self._wake.set()

    async def applied(self) -> None:
        """Wait until the current newest table, or a later one, is in force."""
        wanted = self._published
        async with self._changed:
            await self._changed.wait_for(lambda: self._applied >= wanted)

    async def run(self) -> None:
        """Apply tables until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            number, table = self._published, self._table
            if table is None:
                continue
            try:
                await self._gateway.apply(table)
            except Exception as error:  # routes must be retried after any error
                expected = isinstance(error, GatewayError)
                self._logger.error("routes could not be applied", None if expected else error, error=error)
                self._error = str(error) or type(error).__name__
                if self._failing_since is None:
                    self._failing_since = self._clock()
                self._on_change()
                self._wake.set()
                await asyncio.sleep(_RETRY_S)
                continue
            self._failing_since = None
            self._routed = _routed_apis(table)
            self._due_since = None if number == self._published else self._clock()
            async with self._changed:
                self._applied = number
                self._changed.notify_all()
            self._on_change()


def _routed_apis(table: RoutingTable) -> frozenset[str]:
    return frozenset(
        backend.api for backend in table.backends if backend.servers or backend.jobs_socket or backend.holds
    )
