"""The routing table: which endpoint leads to which replica processes, under which limits. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cortex.gateway.addresses import host_of, is_path


@dataclass(frozen=True)
class Server:
    """One replica process that may get requests."""

    name: str  #: unique in its backend and stable: `<replica id>-<process index>`
    socket: str  #: path of its unix socket, or `host:port` in numbers, `[host]:port` of IPv6
    capacity: int  #: requests that the gateway may have open there at once, those lent to slow clients included
    near: str = ""  #: path of its unix socket on its own machine, where `socket` is `host:port`

    def seen_from(self, folders: Mapping[str, Path]) -> Server:
        """See `RoutingTable.seen_from`."""
        folder = folders.get(host_of(self.socket)) if is_path(self.near) else None
        return replace(self, socket=self.near, near="") if folder == Path(self.near).parent else self


@dataclass(frozen=True)
class Backend:
    """One API as the gateway sees it."""

    api: str
    endpoint: str  #: `/iris`; matched exactly, with and without a trailing slash, and with `/info` after it
    timeout_s: float
    max_body_bytes: int
    max_queue: int  #: requests that may wait for a free process, per ready process; beyond it callers get 503
    unavailable: str  #: what a caller reads in the 503 while `servers` is empty: `starting`, `ValueError: …`
    servers: tuple[Server, ...] = ()
    jobs_socket: str = ""  #: of an API that runs jobs: the operator's socket, which takes them instead of any server
    holds: bool = False  #: while `servers` is empty, requests wait for one instead of being refused
    access_log: bool = False  #: a line is written per request
    needs_key: bool = False  #: only callers with a key get in


@dataclass(frozen=True)
class Share:
    """What one API gets of a splitter's requests."""

    api: str
    percent: int


@dataclass(frozen=True)
class Split:
    """A TrafficSplitter as the gateway sees it: each request goes to one API, and perhaps a copy to another."""

    name: str
    endpoint: str
    shares: tuple[Share, ...]  #: sum up to 100
    shadow: Share | None = None  #: gets copies of so many requests; nobody waits for its answers
    needs_key: bool = False  #: only callers with a key get in, which the APIs then don't ask for again


@dataclass(frozen=True)
class ApiKey:
    """What opens APIs to a caller. The key itself is known to nobody else."""

    id: str
    digest: str  #: SHA-256 of the key in hexadecimal, lower case
    apis: tuple[str, ...] = ()  #: APIs and splitters that it is for; none: all


@dataclass(frozen=True)
class RoutingTable:
    """All APIs and splitters, sorted by name, and the keys that open those which need one."""

    backends: tuple[Backend, ...] = ()
    splits: tuple[Split, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    gateway_secret: str = field(default="", repr=False)  #: what replicas over TCP are shown; "": nothing

    def seen_from(self, folders: Mapping[str, Path]) -> RoutingTable:
        """Return the table for a gateway on a machine where the unix sockets are in `folders`, by its addresses.

        Servers at such an address are reached by their path, if it is in that folder and HAProxy can be given it.
        """
        if not folders:
            return self
        backends = (
            replace(backend, servers=tuple(server.seen_from(folders) for server in backend.servers))
            for backend in self.backends
        )
        return replace(self, backends=tuple(backends))

    @property
    def asks_for_keys(self) -> bool:
        """Tell whether anything is there that only callers with a key get into."""
        return any(each.needs_key for each in self.backends) or any(each.needs_key for each in self.splits)
