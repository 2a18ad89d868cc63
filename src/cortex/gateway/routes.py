"""Routing table: endpoints, the backends that they lead to, traffic splits and API keys; its JSON form.

Pure data. The field names are the keys of the JSON form, which operators and nodes of other versions read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cortex.gateway.addresses import host_of, is_path
from cortex.gateway.protocols import Protocol
from cortex.payloads.json_object import Json
from cortex.processes.codec import decode, encode, newer


@dataclass(frozen=True)
class Server:
    """One process of a replica that may receive requests."""

    name: str  #: unique in its backend and stable: `<replica id>-<process index>`
    socket: str  #: path of its unix socket, or numeric `host:port`, `[host]:port` for IPv6
    capacity: int  #: maximum number of open requests of the gateway there, including those lent to slow clients
    near: str = ""  #: path of its unix socket on its own machine, if `socket` is `host:port`

    def with_local_socket(self, folders: Mapping[str, Path]) -> Server:
        """Return the server for a gateway; see `RoutingTable.with_local_sockets`."""
        folder = folders.get(host_of(self.socket)) if is_path(self.near) else None
        return replace(self, socket=self.near, near="") if folder == Path(self.near).parent else self


@dataclass(frozen=True)
class Cors:
    """The permissions of browser pages that another origin serves."""

    origins: tuple[str, ...]  #: that may read responses, such as `https://example.com`; `*`: every origin
    headers: tuple[str, ...] = ("*",)  #: that their requests may have; `*`: all
    credentials: bool = False  #: whether their requests may have cookies


#: Share of a canary that gets copies of all requests, and responds to none.
COPIES_OF_ALL = 100


@dataclass(frozen=True)
class Canary:
    """The servers of an API's newest revision while it is tried, and their share of the API's requests."""

    percent: int  #: 0 to 100
    servers: tuple[Server, ...] = ()
    gets_copies: bool = newer(False)  #: of all requests that `servers` of the API get; its responses are dropped


@dataclass(frozen=True)
class ApiBackend:
    """The servers and limits of one API."""

    api: str
    endpoint: str  #: `/iris`; also matches with a trailing slash and with `/info` appended
    timeout_s: float
    max_body_bytes: int
    max_queue: int  #: requests that may wait for a free process, per ready process; more are answered with 503
    #: Reason in the 503 response while `servers` is empty: `starting`, `out of memory`. "": nothing keeps the API from
    #: answering, since it has been ready before and `holds`, or runs jobs.
    unavailable: str
    servers: tuple[Server, ...] = ()
    jobs_socket: str = ""  #: of an API that runs jobs: the operator's socket, which replaces `servers`
    holds: bool = False  #: while `servers` is empty, requests wait for a server instead of being refused
    access_log: bool = False  #: write one line per request to the access log
    needs_key: bool = False  #: require an API key
    cors: Cors | None = newer(None)  #: None: pages of every origin may read responses
    has_docs: bool = newer(False)  #: the operator answers `openapi.json` and `docs` below the endpoint
    subpaths: tuple[str, ...] = newer(("/v2",))  #: all paths below these, after the endpoint, lead to its replicas

    sticky: bool = newer(False)  #: send the requests of a client to the same process, by a cookie
    replica_protocol: Protocol = newer(Protocol.CALLS)  #: of `servers`
    canary: Canary | None = newer(None)  #: None: `servers` get all requests
    finishes_calls: bool = newer(False)  #: a request is finished although its client disconnects

    @property
    def protocol(self) -> Protocol:
        """The row of `protocols.RULES` by which the gateway serves the API."""
        return Protocol.JOBS if self.jobs_socket else self.replica_protocol

    def with_local_sockets(self, folders: Mapping[str, Path]) -> ApiBackend:
        """Return the backend for a gateway; see `RoutingTable.with_local_sockets`."""
        canary = self.canary and replace(self.canary, servers=_with_local_sockets(self.canary.servers, folders))
        return replace(self, servers=_with_local_sockets(self.servers, folders), canary=canary)


@dataclass(frozen=True)
class Share:
    """The percentage of a splitter's requests that one API receives."""

    api: str
    percent: int


def required_apis(shares: Iterable[Share]) -> list[str]:
    """Return the APIs that must be ready for a splitter to be ready: those that get requests. Empty: it never is."""
    return [share.api for share in shares if share.percent]


@dataclass(frozen=True)
class Split:
    """A TrafficSplitter: each request goes to one API, and possibly a copy to another."""

    name: str
    endpoint: str
    shares: tuple[Share, ...]  #: the percentages add up to 100
    shadow: Share | None = None  #: receives copies of this percentage of requests; its responses are dropped
    needs_key: bool = False  #: require an API key here; the APIs then don't check it again
    cors: Cors | None = newer(None)  #: None: those of the first of its APIs that has them
    has_docs: bool = newer(False)  #: as that of an API


@dataclass(frozen=True)
class ApiKey:
    """The hash of an API key, and the APIs that it gives access to."""

    id: str
    digest: str  #: SHA-256 of the key, in lower-case hexadecimal
    apis: tuple[str, ...] = ()  #: APIs and splitters; empty: all


@dataclass(frozen=True)
class RoutingTable:
    """All APIs and splitters, sorted by name, and the API keys."""

    backends: tuple[ApiBackend, ...] = ()
    splits: tuple[Split, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    gateway_secret: str = field(default="", repr=False)  #: sent to replicas over TCP; "": nothing is sent
    operator_socket: str = newer("")  #: of the operator, which answers requests for documentation; "": nobody does
    v2_at_root: bool = newer(False)  #: also serve the Open Inference Protocol at `/v2`, with APIs as models
    connections_per_address: int = newer(0)  #: limit of connections from one address; 0: by the gateway's memory

    def with_local_sockets(self, folders: Mapping[str, Path]) -> RoutingTable:
        """Return the table for the gateway of a machine whose sockets folder is given for each of its addresses.

        Servers at such an address are reached by their unix socket if it lies in that folder and its path is valid.
        """
        if not folders:
            return self
        return replace(self, backends=tuple(backend.with_local_sockets(folders) for backend in self.backends))

    @property
    def has_docs(self) -> bool:
        """Return whether the operator answers requests for the documentation of any API or splitter."""
        entries: tuple[ApiBackend | Split, ...] = (*self.backends, *self.splits)
        return bool(self.operator_socket) and any(each.has_docs for each in entries)

    @property
    def requires_keys(self) -> bool:
        """Return whether any API or splitter requires a key."""
        return any(each.needs_key for each in self.backends) or any(each.needs_key for each in self.splits)


def _with_local_sockets(servers: Iterable[Server], folders: Mapping[str, Path]) -> tuple[Server, ...]:
    return tuple(server.with_local_socket(folders) for server in servers)


def table_to_json(table: RoutingTable) -> Json:
    """Return the JSON form, which includes the gateway's secret."""
    data: Json = encode(table)
    return data


def table_from_json(data: Json) -> RoutingTable:
    """Parse the JSON form.

    Unknown fields are refused, not ignored: one of them may restrict the access to an API. Raises: ValueError.
    """
    return decode(RoutingTable, data, refuse_unknown=True)
