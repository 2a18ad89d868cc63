"""The routing table: which endpoint leads to which replica processes, under which limits. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Server:
    """One replica process that may get requests."""

    name: str  #: unique in its backend and stable: `<replica id>-<process index>`
    socket: str  #: path of its unix socket
    capacity: int  #: requests that the gateway may have open there at once, those lent to slow clients included


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


@dataclass(frozen=True)
class RoutingTable:
    """All APIs, sorted by name."""

    backends: tuple[Backend, ...] = ()
