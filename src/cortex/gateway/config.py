"""Owns HAProxy's configuration text, as a pure function of the routing table; does no I/O.

No text of users is in it: see `maps`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from importlib import resources

from cortex.errors import GatewayError
from cortex.gateway.access import frontend_log
from cortex.gateway.addresses import is_address, is_path
from cortex.gateway.backends import (
    TIMEOUT_MARGIN_MS,
    TIMEOUT_MAX_MS,
    Sockets,
    is_unix,
    json_error,
    milliseconds,
    section,
    servers,
    tcp_rules,
)
from cortex.gateway.keys import keyed_splits, section_rules
from cortex.gateway.maps import (
    HEALTH_BACKEND,
    INFO_MAP,
    JOBS_MAP,
    KEYS_MAP,
    ROUTES_MAP,
    UNKNOWN_BACKEND,
    Maps,
    fixed_maps,
    keys_map,
    live_maps,
    map_text,
)
from cortex.gateway.routes import Backend, RoutingTable
from cortex.gateway.splits import split_routes, split_rules

CONFIG_FILE = "haproxy.cfg"
CERTIFICATE_FILE = "certificate.pem"
LUA_FILE = "gateway.lua"
# Read once: while this code runs, another version may be installed over it.
_SCRIPT = resources.files("cortex.gateway").joinpath(LUA_FILE).read_text()

#: A whole request or answer of up to 1 MiB waits in the gateway while its client is slow, not in a replica. Pages of
#: a buffer cost memory only once they are written.
BUFFER_BYTES = 1024 * 1024 + 64 * 1024
#: Buffers kept for reuse. Without room for a dozen of them each request would map and unmap its own: twice the CPU.
BUFFER_CACHE_BYTES = 16 * 1024 * 1024
HEADERS_MAX_BYTES = 64 * 1024
#: An upload may go on for longer than an API's timeout, also in a worker that was reloaded away.
_LONGEST_UPLOAD_S = 3600.0

_TLS = f" ssl crt {CERTIFICATE_FILE} ssl-min-ver TLSv1.2 alpn http/1.1"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_ENDPOINT = re.compile(r"/[!-~]{0,1000}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{0,200}")
_HOST = re.compile(r"[A-Za-z0-9_.:*-]{1,255}")


@dataclass(frozen=True)
class GatewaySettings:
    """How the gateway listens and how long it bears with its clients."""

    host: str = "127.0.0.1"
    port: int = 8888
    threads: int = 1
    max_connections: int = 10_000
    header_timeout_s: float = 10.0  #: from the first byte of a request to the end of its headers
    body_timeout_s: float = 1800.0  #: for a body to come in, or to fill the buffer
    client_timeout_s: float = 60.0  #: of silence in a body, or in reading an answer
    keep_alive_s: float = 300.0  #: an idle connection is kept
    certificate: str = field(default="", repr=False)  #: PEM, with chain and key; "": plain HTTP


@dataclass(frozen=True)
class Rendered:
    """The files HAProxy reads, and a digest of all in them that can't be changed while it runs."""

    config: str
    maps: Maps  #: by file name
    script: str
    structure: str
    certificate: str = field(default="", repr=False)

    @property
    def files(self) -> dict[str, str]:
        """Every file by its name."""
        maps = {name: map_text(entries) for name, entries in self.maps.items()}
        certificate = {CERTIFICATE_FILE: self.certificate} if self.certificate else {}
        return {CONFIG_FILE: self.config, LUA_FILE: self.script, **certificate, **maps}


def render(table: RoutingTable, settings: GatewaySettings, sockets: Sockets) -> Rendered:
    """Write the configuration for `table`. Raises: GatewayError for a name, endpoint or path that is not plain."""
    _check_table(table)
    frame = [
        _global(settings, sockets, _longest_timeout_ms(table)),
        _defaults(settings),
        _frontend(table, settings, sockets),
        _inside(sockets),
        *_fixed_sections(sockets),
    ]
    keyed = keyed_splits(table)
    sections = [
        section(
            backend,
            sockets,
            settings.body_timeout_s,
            section_rules(backend, table, keyed) + tcp_rules(backend, table.gateway_secret),
        )
        for backend in table.backends
    ]
    fixed = fixed_maps(table)
    parts = [*frame, *sections, _SCRIPT, settings.certificate, *map(map_text, fixed.values())]
    structure = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    frame[0] += f"  description {structure}\n"
    with_servers = [text + servers(backend) for text, backend in zip(sections, table.backends, strict=True)]
    maps = {**fixed, **live_maps(table), KEYS_MAP: keys_map(table)}
    return Rendered("\n".join([*frame, *with_servers]), maps, _SCRIPT, structure, settings.certificate)


def _check_table(table: RoutingTable) -> None:
    if not _SECRET.fullmatch(table.gateway_secret):
        raise GatewayError("the gateway's secret can't be given to HAProxy: it is too long or has unusual characters")
    for backend in table.backends:
        _check_backend(backend)
    for split in table.splits:
        _check("splitter's name", _NAME, split.name)
        _check("endpoint", _ENDPOINT, split.endpoint)
    for key in table.keys:
        for what, pattern, value in (("key's id", _NAME, key.id), ("key's hash", _DIGEST, key.digest)):
            _check(what, pattern, value)
        for api in key.apis:
            _check("API name", _NAME, api)


def _check_backend(backend: Backend) -> None:
    _check("API name", _NAME, backend.api)
    _check("endpoint", _ENDPOINT, backend.endpoint)
    if backend.jobs_socket:
        _check_path(backend.jobs_socket)
    for server in backend.servers:
        _check("server name", _NAME, server.name)
        if is_unix(server):
            _check_path(server.socket)
        elif not is_address(server.socket):
            raise GatewayError(f"{server.socket!r} of server {server.name!r} is neither a path nor a numeric host:port")


def _check(what: str, pattern: re.Pattern[str], value: str) -> None:
    if not pattern.fullmatch(value):
        raise _unusual(what, value)


def _check_path(path: str) -> None:
    if not is_path(path):
        raise _unusual("socket path", path)


def _unusual(what: str, value: str) -> GatewayError:
    return GatewayError(f"{what} {value!r} can't be given to HAProxy: it is too long or has unusual characters")


def _longest_timeout_ms(table: RoutingTable) -> int:
    longest = (_LONGEST_UPLOAD_S if backend.jobs_socket else backend.timeout_s for backend in table.backends)
    return max(map(milliseconds, longest), default=1000)


def _global(settings: GatewaySettings, sockets: Sockets, longest_ms: int) -> str:
    for path in (sockets.stats, sockets.successor, sockets.inside):
        _check_path(path)
    # A worker that was reloaded away may still have a request in its queue and then in a replica, after the
    # keep-alive of the connection that sent it.
    hard_stop_ms = min(2 * longest_ms + 2 * TIMEOUT_MARGIN_MS + milliseconds(settings.keep_alive_s), TIMEOUT_MAX_MS)
    return f"""\
global
  master-worker
  nbthread {settings.threads}
  maxconn {settings.max_connections}
  # Each server may need a descriptor for its checks: rather fewer connections than no gateway.
  no strict-limits
  noreuseport
  hard-stop-after {hard_stop_ms}ms
  mworker-max-reloads 100
  tune.bufsize {BUFFER_BYTES}
  tune.memory.hot-size {BUFFER_CACHE_BYTES}
  lua-load {LUA_FILE}
  stats timeout 24d
  stats socket '{sockets.stats}' mode 600 level admin expose-fd listeners
"""


def _defaults(settings: GatewaySettings) -> str:
    client_ms = milliseconds(settings.client_timeout_s)
    return f"""\
defaults
  mode http
  balance leastconn
  timeout client {client_ms}ms
  timeout connect 5s
  timeout server 60s
  timeout tunnel 1h
  timeout http-request {milliseconds(settings.header_timeout_s)}ms
  timeout http-keep-alive {milliseconds(settings.keep_alive_s)}ms
  # A caller that hangs up is taken out of the queue, and its call in the replica is cancelled.
  option abortonclose
  # A reload closes an idle connection after its next answer, not under the hands of a client about to use it.
  option idle-close-on-response
  option http-no-delay
  # Only what never reached a replica is sent again: user code may have seen the rest.
  retry-on conn-failure
  option redispatch 1
  http-reuse always
  http-error status 400 {json_error("bad request")}
  http-error status 403 {json_error("forbidden")}
  http-error status 404 {json_error("not found")}
  http-error status 408 {json_error("the request did not come in in time")}
  http-error status 413 {json_error("the request is too large")}
  http-error status 500 {json_error("the gateway failed")}
  http-error status 502 {json_error("the replica closed the connection before it answered")}
  http-error status 503 {json_error("no replica could be reached")} hdr Retry-After 1
  http-error status 504 {json_error("timed out")}
"""


def _frontend(table: RoutingTable, settings: GatewaySettings, sockets: Sockets) -> str:
    _check("host", _HOST, settings.host)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    cors = (
        "hdr access-control-allow-methods 'GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS'"
        " hdr access-control-allow-headers '*, Authorization' hdr access-control-max-age 86400"
    )
    routes = f"use_backend %[path,map({ROUTES_MAP})]"
    if any(backend.jobs_socket for backend in table.backends):
        # Without a condition, HAProxy looks at no rule after the first. The path of a job is its endpoint and one part.
        routes += f" if {{ path,map({ROUTES_MAP}) -m found }}"
        routes += f"\n  use_backend %[path,regsub('[^/]+$',''),map({JOBS_MAP})]"
    return f"""\
frontend gateway
  bind {host}:{settings.port} proto h1{_TLS if settings.certificate else ""}
  bind 'unix@{sockets.successor}' mode 600 proto h1
  unique-id-format %[date(0,ms)]-%pid-%rt
  unique-id-header X-Cortex-Request-ID
{frontend_log(table)}\
  http-request return status 204 {cors} if {{ method OPTIONS }}
  http-request deny deny_status 400 if {{ req.hdrs_bin,length gt {HEADERS_MAX_BYTES} }}
  http-request del-header x-cortex- -m beg
  http-request set-header x-cortex-info 1 if {{ path_end /info }} {{ path,map({INFO_MAP}) -m found }}
{split_rules(table, sockets, settings.body_timeout_s)}\
  http-after-response set-header x-cortex-request-id %[unique-id] unless {{ be_name -m str cortex-successor }}
  http-after-response set-header access-control-allow-origin *
  # After a reload this worker's servers can't be changed any more. What still comes, on connections that were idle, is
  # for the worker that took over.
  use_backend cortex-successor if {{ stopping }}
{split_routes(table)}\
  {routes}
  default_backend {UNKNOWN_BACKEND}
"""


def _inside(sockets: Sockets) -> str:
    """Write where requests come in that the gateway sends itself; their headers are not a client's."""
    return f"""\
frontend cortex-inside
  bind 'unix@{sockets.inside}' mode 600 proto h1
  unique-id-format %[req.hdr(x-cortex-request-id)]
  http-request set-var(txn.backend) req.hdr(x-cortex-backend)
  http-request del-header x-cortex-backend
  http-request set-var(txn.held) req.hdr(x-cortex-held)
  http-request del-header x-cortex-held
  use_backend %[var(txn.backend)]
  default_backend {UNKNOWN_BACKEND}
"""


def _fixed_sections(sockets: Sockets) -> tuple[str, ...]:
    return (
        f"""\
backend {UNKNOWN_BACKEND}
  http-request return status 404 {json_error("no API has the path %[path,bytes(0,200),json(utf8ps)]")}
""",
        f"""\
backend {HEALTH_BACKEND}
  http-request return status 200 content-type application/json string '{{"ok": true}}'
""",
        f"""\
backend cortex-successor
  timeout server {TIMEOUT_MAX_MS}ms
  server successor 'unix@{sockets.successor}'
""",
    )
