"""HAProxy's configuration text, as a pure function of the routing table and the gateway's settings.

The configuration contains no text from users; see `maps`. What changes often (servers, values of maps) is left out of
the digest `structure`: commands change it while HAProxy runs. Anything else needs a reload, which starts a new worker
process.

Path of a request (the names are HAProxy's sections):

```text
client ──TCP──▶ frontend gateway                     backend api:NAME ──unix/TCP──▶ replica process
                  request id, CORS, drop x-cortex-*    key, body, hold, queue
                  splitter: draw a slot, copy ──┐
                  path in routes.map? ──────────┼──▶ backend jobs:NAME, cortex-docs ──unix──▶ operator
                  begins as in prefixes.map? ───┤      (then the replica gets x-cortex-endpoint, see below)
                  else ─────────────────────────┼──▶ backend cortex-unknown (404), cortex-health
                                                └──▶ copy for a shadow, to the socket "inside"
```

**Requests are held while an API has no replica** (`holds`), without a process that could lose them. HAProxy can't wait
for a server to appear, except in Lua; but during a Lua wait it would not notice that the client disconnects. So the
request passes through the gateway twice:

```text
client ──▶ frontend gateway ──▶ backend api:NAME           no server is up:
                                  server cortex-hold ────┐  1st pass: HAProxy waits for this server's response and
                                                         │  watches the client; headers name the backend and "held"
         socket "inside" ◀───────────────────────────────┘
             └─▶ frontend cortex-inside ──▶ backend api:NAME
                                              lua.cortex_hold   2nd pass: sleep until a server is up (every 50 ms),
                                              replica           or the timeout of the API is over (504)
```

When a replica starts, the operator adds a server by command; the Lua loop sees it, and the second pass continues to it.
Its response travels back through the first pass. If the client disconnects, the first pass closes the connection to
`cortex-hold`, which ends the second pass. Requests that find a server skip all of this.

**Requests are refused before their body is complete**, such as without a key. HAProxy closes a connection whose request
is not complete with the response, and a client that still sends would see a reset. So such a request goes to a server,
`cortex-refusals`, which is a frontend of the gateway: it responds, and receives the rest of the body
within the limits in `gateway.lua`. Refusals of complete requests are answered at once.

**After a reload** the old worker finishes its requests, but commands can't add or remove its servers any more. It must
therefore send nothing to its servers that has not reached them yet. The new worker listens on the sockets "successor"
and "inside", both of which an old worker uses like any client:

```text
idle keep-alive connection ──▶ old worker: frontend gateway ──{ stopping }──▶ backend cortex-successor
                                                                                 └─ "successor" ─▶ new worker
held request ──▶ old worker, 2nd pass: Lua returns ──▶ server cortex-hold ── "inside" ─▶ new worker, 3rd pass: Lua
```

**Paths below an endpoint**: a path that no other map has leads to the API or splitter of its longest beginning in
`prefixes.map`. Only such a request has the header `x-cortex-endpoint` with the endpoint before the rest of its path,
and `x-cortex-splitter` with the name of the splitter that it was sent to. Other requests pay for one comparison.

**Canaries**: the newest revision of an API, while it is tried, has a backend of its own. A random number from 0 to 99
selects one of the two in `canaries.map`, after all other rules have found the API.

**Splitters**: a random number from 0 to 99 selects the API of a request in `slots.map`, and whether a shadow gets a
copy in `shadows.map`, so weights change without a reload. Lua sends the copies to the socket "inside".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from importlib import resources

from cortex import __version__
from cortex.errors import GatewayError
from cortex.gateway.access_log import frontend_log
from cortex.gateway.addresses import is_address, is_path
from cortex.gateway.backends import (
    INSIDE_FRONTEND,
    IS_GRPC_TOOL,
    KEYED_COUNTER,
    TIMEOUT_MARGIN_MS,
    TIMEOUT_MAX_MS,
    GatewaySockets,
    check_keys_of_copies,
    docs_section,
    forget_keys_of_copies,
    is_unix,
    keyed_splits,
    milliseconds,
    section,
    servers,
    splitter_key_rules,
)
from cortex.gateway.cors import request_rules, response_rules
from cortex.gateway.maps import (
    BACKEND_PREFIX,
    CANARIES_MAP,
    DRAINING_BACKEND,
    DRAINING_SERVER,
    GRPC_MAP,
    HEALTH_BACKEND,
    INFO_MAP,
    JOBS_MAP,
    KEYS_MAP,
    OPERATOR_BACKEND,
    PREFIXES_MAP,
    ROUTES_MAP,
    SHADOWS_MAP,
    SLOTS_MAP,
    SPLITS_MAP,
    UNKNOWN_BACKEND,
    V2_BACKEND,
    V2_PATH,
    Maps,
    backend_name,
    cors_by_key,
    fixed_maps,
    grpc_backends,
    grpc_service,
    keys_map,
    live_maps,
    map_text,
    v2_names,
    with_canaries,
)
from cortex.gateway.protocols import (
    DETECTED_ERRORS,
    END_OF_REFUSALS,
    GRPC_BACKEND,
    GRPC_RESPONSES,
    KEYED_BACKEND,
    PROBES_BACKEND,
    REFUSALS_SERVER,
    RULES,
    SET_GRPC,
    grpc_error,
    json_error,
    refusals_server,
    refuse,
)
from cortex.gateway.routes import ApiBackend, RoutingTable
from cortex.payloads.inference_protocol import EXTENSIONS

CONFIG_FILE = "haproxy.cfg"
CERTIFICATE_FILE = "certificate.pem"
LUA_FILE = "gateway.lua"
#: The frontend for clients.
FRONTEND = "gateway"
# Read at import: another version may be installed while this process runs.
_SCRIPT = resources.files("cortex.gateway").joinpath(LUA_FILE).read_text()

#: The gateway buffers a request or response of up to 1 MiB while its client is slow, so that no replica has to. Pages
#: of a buffer use memory only once they are written.
BUFFER_BYTES = 1024 * 1024 + 64 * 1024
#: Buffers kept for reuse. Without room for a dozen, each request maps and unmaps its own: twice the CPU time.
BUFFER_CACHE_BYTES = 16 * 1024 * 1024
#: Headers of a request or response, beyond which HAProxy answers with a page of its own; see `HEAD_MAX_COUNT` for
#: the limit of requests. Each takes 64 bytes of the stack while they are parsed.
HEADERS_MAX = 8192
#: Time without progress after which the gateway ends a request that it has refused, see `gateway.lua`.
_REFUSAL_IDLE_S = 5
#: Requests that a client may have open on one connection of HTTP/2.
STREAMS = 1000
#: Part of the buffers that one address can fill, unless an installation has another limit. A slow client may fill two.
_ADDRESS_PART = 4
#: Addresses of one IPv6 network count as one: each of its hosts has 2^64 of them.
_ADDRESS = "src,ipmask(32,64)"
_STREAMS_BACKEND = "cortex-streams"

_TLS = f" ssl crt {CERTIFICATE_FILE} ssl-min-ver TLSv1.2 alpn"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_ENDPOINT = re.compile(r"/[!-~]{0,1000}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{0,200}")
_ORIGIN = re.compile(r"[!-~]{1,300}")
_HEADER = re.compile(r"[A-Za-z0-9_-]{1,200}|[*]")
_HOST = re.compile(r"[A-Za-z0-9_.:*-]{1,255}")


@dataclass(frozen=True)
class GatewaySettings:
    """Listening address, limits and timeouts of the gateway."""

    host: str = "127.0.0.1"
    port: int = 8888
    threads: int = 1
    max_connections: int = 10_000
    header_timeout_s: float = 10.0  #: from the first byte of a request to the end of its headers
    body_timeout_s: float = 300.0  #: until a body is complete, or fills the buffer
    client_timeout_s: float = 60.0  #: without progress in sending a body or reading a response
    keep_alive_s: float = 300.0  #: until an idle connection is closed
    certificate: str = field(default="", repr=False)  #: PEM, with chain and key; "": plain HTTP
    max_buffers: int = 10_000  #: of `BUFFER_BYTES`; beyond it, requests and responses wait for each other


@dataclass(frozen=True)
class RenderedConfig:
    """The files that HAProxy reads, and a digest of everything in them that needs a reload to change."""

    config: str
    maps: Maps  #: by file name
    script: str
    structure: str
    certificate: str = field(default="", repr=False)

    @property
    def files(self) -> dict[str, str]:
        """The contents of all files by name; the last one names the structure of all."""
        maps = {name: map_text(entries) for name, entries in self.maps.items()}
        certificate = {CERTIFICATE_FILE: self.certificate} if self.certificate else {}
        return {LUA_FILE: self.script, **certificate, **maps, CONFIG_FILE: self.config}


_TO_SUCCESSOR = """\
  http-request set-header x-cortex-client %[src]
  http-request set-header x-cortex-scheme http unless { ssl_fc }
  http-request set-header x-cortex-scheme https if { ssl_fc }
"""
#: The metadata of a gRPC call, or the message of a health check, selects an API. Its own key is then required, not that
#: of a splitter.
_CALLED = "{ var(txn.called) -m found }"

_FROM_OLD_WORKER = """\
  http-request set-var(txn.client) req.hdr(x-cortex-client) if { so_name successor }
  http-request set-var(txn.scheme) req.hdr(x-cortex-scheme) if { so_name successor }
"""


#: Answers the questions whether the gateway lives, in the form of each of their paths.
_LIVE = """\
  http-request return status 200 content-type application/json string '{"ok": true}' if { path /livez /healthz }
  http-request return status 200 content-type application/json string '{"live":true}' if { path_end /v2/health/live }
"""


def render(table: RoutingTable, settings: GatewaySettings, sockets: GatewaySockets) -> RenderedConfig:
    """Render the configuration. Raises: GatewayError for names, endpoints or paths with special characters."""
    _validate(table, settings, sockets)
    process = _global(table, settings, sockets)
    frame = [
        _defaults(table, settings),
        _frontend(table, settings, sockets),
        _inside(sockets),
        _refusals(sockets),
        *_fixed_sections(table, settings, sockets),
        *docs_section(table),
        *([_v2_section(table, sockets)] if table.v2_at_root else []),
    ]
    keyed = keyed_splits(table)
    backends = with_canaries(table)
    sections = [section(backend, table, sockets, settings.body_timeout_s, keyed) for backend in backends]
    fixed = fixed_maps(table)
    parts = [process, *frame, *sections, _SCRIPT, settings.certificate, *map(map_text, fixed.values())]
    structure = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    described = process + description(structure)
    with_servers = [text + servers(backend) for text, backend in zip(sections, backends, strict=True)]
    maps = {**fixed, **live_maps(table), KEYS_MAP: keys_map(table)}
    return RenderedConfig("\n".join([described, *frame, *with_servers]), maps, _SCRIPT, structure, settings.certificate)


def description(structure: str) -> str:
    """Return the line of the configuration that names the structure."""
    return f"  description {structure}\n"


def _validate(table: RoutingTable, settings: GatewaySettings, sockets: GatewaySockets) -> None:
    _check("host", _HOST, settings.host)
    for path in (*astuple(sockets), *filter(None, [table.operator_socket])):
        _check_path(path)
    if not _SECRET.fullmatch(table.gateway_secret):
        raise GatewayError("the gateway's secret is too long or contains characters that HAProxy can't be given")
    for backend in with_canaries(table):
        _check_backend(backend)
    for split in table.splits:
        _check("splitter's name", _NAME, split.name)
        _check("endpoint", _ENDPOINT, split.endpoint)
    for cors in cors_by_key(table).values():
        for origin in cors.origins:
            _check("origin", _ORIGIN, origin)
        for header in cors.headers:
            _check("header", _HEADER, header)
    for key in table.keys:
        for what, pattern, value in (("key's id", _NAME, key.id), ("key's hash", _DIGEST, key.digest)):
            _check(what, pattern, value)
        for api in key.apis:
            _check("API name", _NAME, api)


def _check_backend(backend: ApiBackend) -> None:
    _check("API name", _NAME, backend.api)
    _check("endpoint", _ENDPOINT, backend.endpoint)
    for path in backend.subpaths:
        _check("path", _ENDPOINT, path)
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
        raise _invalid(what, value)


def _check_path(path: str) -> None:
    if not is_path(path):
        raise _invalid("socket path", path)


def _invalid(what: str, value: str) -> GatewayError:
    return GatewayError(f"{what} {value!r} is too long or contains characters that HAProxy can't be given")


def _global(table: RoutingTable, settings: GatewaySettings, sockets: GatewaySockets) -> str:
    # Without `hard-stop-after`: an old worker stays while it has connections, see `haproxy.excess_workers`.
    return f"""\
global
  master-worker
  nbthread {settings.threads}
  maxconn {settings.max_connections}
  # Checks may need one descriptor per server: prefer fewer connections to a gateway that does not start.
  no strict-limits
  noreuseport
  tune.bufsize {BUFFER_BYTES}
  tune.buffers.limit {settings.max_buffers}
  tune.memory.hot-size {BUFFER_CACHE_BYTES}
  tune.stick-counters {KEYED_COUNTER + 1 if _has_keys(table) or grpc_backends(table) else 3}
  tune.http.maxhdr {HEADERS_MAX}
  tune.h2.fe.max-concurrent-streams {STREAMS}
  # Clients open WebSockets over HTTP/1.1, also where the port has HTTP/2 for gRPC.
  h2-workaround-bogus-websocket-clients
  lua-load {LUA_FILE}
  stats timeout 24d
  stats socket '{sockets.stats}' mode 600 level admin expose-fd listeners
"""


def _defaults(table: RoutingTable, settings: GatewaySettings) -> str:
    # A client of a gRPC stream may be silent for as long as the API allows, without having ended its request.
    client_ms = milliseconds(max([settings.client_timeout_s, *(api.timeout_s + 1 for api in grpc_backends(table))]))
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
  # If a client disconnects, drop its request from the queue, or cancel its call in the replica.
  option abortonclose
  # After a reload, close an idle connection only after its next response, not while its client sends a request.
  option idle-close-on-response
  option http-no-delay
  # Retry only requests that never reached a replica: user code may have seen the others.
  retry-on conn-failure
  option redispatch 1
  http-reuse always
{_http_errors({**DETECTED_ERRORS, 400: "bad request", 504: "timed out"})}\
  http-error status 503 {json_error("no replica could be reached").options} hdr Retry-After 1
"""


def _http_errors(messages: Mapping[int, str]) -> str:
    return "".join(f"  http-error status {status} {json_error(text).options}\n" for status, text in messages.items())


def _frontend(table: RoutingTable, settings: GatewaySettings, sockets: GatewaySockets) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    below = "http-request set-header x-cortex-endpoint %[var(txn.prefix),field(2,|,0)] if { var(txn.prefix) -m found }"
    routes = f"use_backend %[path,map({ROUTES_MAP})]"
    if any(backend.jobs_socket for backend in table.backends):
        # Without a condition, HAProxy ignores all rules after the first. A job's path is its endpoint and one segment.
        routes += f" if {{ path,map({ROUTES_MAP}) -m found }}"
        routes += f"\n  use_backend %[path,regsub('[^/]+$',''),map({JOBS_MAP})]"
    return f"""\
frontend {FRONTEND}
  bind {host}:{settings.port}{_client_protocols(table, settings)}
  bind 'unix@{sockets.successor}' mode 600 proto h1{_of_successor(table, " name successor")}
  stick-table type ipv6 size {settings.max_connections} expire 1m store conn_cur
  tcp-request connection track-sc2 {_ADDRESS}
  tcp-request connection reject if {{ sc2_conn_cur gt {per_address(table, settings)} }}
  unique-id-format %[date(0,ms)]-%pid-%rt
  unique-id-header X-Cortex-Request-ID
{frontend_log(table)}\
{_prefix_rule(table)}\
{request_rules(table)}\
{_of_successor(table, _FROM_OLD_WORKER)}\
{_stream_rules(table, settings)}\
{_grpc_rules(table)}\
  http-request del-header x-cortex- -m beg
{_grpc_services(table)}\
  http-request set-header x-cortex-info 1 if {{ path_end /info }} {{ path,map({INFO_MAP}) -m found }}
  {below}
{_split_rules(table, sockets, settings.body_timeout_s)}\
{_canary_rules(table, sockets, settings.body_timeout_s)}\
  # A response of the worker that replaced this one is complete.
  http-after-response allow if {{ stopping }} {{ be_name -m str cortex-successor }}
  http-after-response set-header x-cortex-request-id %[unique-id]
{response_rules(table)}\
  http-after-response set-header connection close if {{ nbsrv({DRAINING_BACKEND}) gt 0 }}
  # An old worker passes what still arrives on idle connections to the worker that replaced it.
  use_backend cortex-successor if {{ stopping }}
{_canary_routes(table)}\
{_grpc_routes(table)}\
{_split_routes(table)}\
  use_backend %[var(txn.prefix),field(1,|)] if {{ var(txn.prefix) -m beg {BACKEND_PREFIX} }}
  {routes}
  default_backend {UNKNOWN_BACKEND}
"""


def per_address(table: RoutingTable, settings: GatewaySettings) -> int:
    """Return the limit of connections from one address."""
    return table.connections_per_address or max(1, settings.max_buffers // _ADDRESS_PART)


def _stream_rules(table: RoutingTable, settings: GatewaySettings) -> str:
    """Return the rules that count the requests of HTTP/2, of which one connection may have many, as connections."""
    if not grpc_backends(table):
        return ""
    is_too_many = f"{{ sc_conn_cur(3,{_STREAMS_BACKEND}) gt {per_address(table, settings)} }}"
    return f"""\
  http-request track-sc3 {_ADDRESS} table {_STREAMS_BACKEND} if {{ fc_http_major 2 }}
  http-request deny deny_status 429 if {is_too_many}
"""


def _of_successor(table: RoutingTable, text: str) -> str:
    """Return a part of the configuration that tells applications the clients of requests that old workers pass on."""
    return text if any(RULES[backend.protocol].forwards_client for backend in table.backends) else ""


def _client_protocols(table: RoutingTable, settings: GatewaySettings) -> str:
    """Return the options of the frontend for clients: HTTP/2, which gRPC needs, only if an API has it."""
    if settings.certificate:
        return f"{_TLS} {'h2,' if grpc_backends(table) else ''}http/1.1"
    return "" if grpc_backends(table) else " proto h1"  # without TLS, clients of HTTP/2 begin with its preface


def _grpc_rules(table: RoutingTable) -> str:
    """Return the rules that find the API of a gRPC call by its metadata, or of a health check by its message.

    The message is in a frame of 5 bytes, and its first field, the name of the service, begins after 2 further bytes.
    """
    if not grpc_backends(table):
        return ""
    is_grpc = "{ req.hdr(content-type) -m beg application/grpc }"
    unknown = f"! {_CALLED}"
    return f"""\
  http-request set-var(txn.called) req.hdr(x-cortex-api),map({GRPC_MAP}) if {is_grpc}
  http-request wait-for-body time 1s at-least 7 if {IS_GRPC_TOOL} {unknown}
  http-request set-var(txn.called) req.body,bytes(7),map({GRPC_MAP}) if {IS_GRPC_TOOL} {unknown}
"""


def _grpc_services(table: RoutingTable) -> str:
    """Return the rule that tells the API which answers reflection the services of all APIs."""
    names = sorted({grpc_service(backend) for backend in grpc_backends(table)})
    return f"  http-request set-header x-cortex-services '{' '.join(names)}' if {IS_GRPC_TOOL}\n" if names else ""


def _grpc_routes(table: RoutingTable) -> str:
    """Return the rules for calls that name their API, and for health checks and reflection that name none."""
    names = [backend_name(backend) for backend in grpc_backends(table)]
    if not names:
        return ""
    ready = [f"  use_backend {name} if {IS_GRPC_TOOL} {{ nbsrv({name}) gt 0 }}\n" for name in names]
    return "".join(
        [
            f"  use_backend %[var(txn.called)] if {_CALLED}\n",
            *ready,
            f"  use_backend {names[0]} if {IS_GRPC_TOOL}\n",
        ]
    )


def _prefix_rule(table: RoutingTable) -> str:
    """Return the rule that finds the longest beginning of a path that no map has as a whole."""
    subpaths = {path.rstrip("/") for backend in table.backends for path in backend.subpaths}
    # A cheap condition comes first: requests at exact paths must not pay for lookups.
    first = "" if "" in subpaths else f"{{ path_dir {' '.join(sorted(subpaths | {V2_PATH}))} }} "
    of_jobs = ""
    if any(backend.jobs_socket for backend in table.backends):
        of_jobs = f" ! {{ path,regsub('[^/]+$',''),map({JOBS_MAP}) -m found }}"
    of_splits = f" ! {{ path,map({SPLITS_MAP}) -m found }}" if table.splits else ""
    taken = f"! {{ path,map({ROUTES_MAP}) -m found }}{of_splits}{of_jobs}"
    return f"  http-request set-var(txn.prefix) path,concat(/),map_beg({PREFIXES_MAP}) if {first}{taken}\n"


def _split_rules(table: RoutingTable, sockets: GatewaySockets, body_timeout_s: float) -> str:
    """Return the rules that draw the API of each request to a splitter, and send a copy to the shadow."""
    if not table.splits:
        return ""
    below = "{ var(txn.prefix) -m found }"
    return f"""\
  http-request set-var(txn.split) path,map({SPLITS_MAP})
  http-request set-var(txn.split) var(txn.prefix),field(1,|) if {below} ! {{ var(txn.prefix) -m beg {BACKEND_PREFIX} }}
{f"  http-request unset-var(txn.split) if {_CALLED}{chr(10)}" if grpc_backends(table) else ""}\
  http-request set-header x-cortex-splitter %[var(txn.split)] if {below} {{ var(txn.split) -m found }}
  http-request set-var-fmt(txn.slot) %[var(txn.split)]:%[rand(100)] if {{ var(txn.split) -m found }}
  http-request set-var-fmt(txn.copied) %[var(txn.split)]:%[rand(100)] if {{ var(txn.split) -m found }}
{splitter_key_rules(keyed_splits(table))}\
  http-request set-var(txn.copy) var(txn.copied),map({SHADOWS_MAP}) if {{ var(txn.split) -m found }}
{_copy_rules(table, sockets, body_timeout_s)}\
"""


def _copy_rules(table: RoutingTable, sockets: GatewaySockets, body_timeout_s: float, condition: str = "") -> str:
    """Return the rules that send a copy of a request to the backend in txn.copy."""
    copied = f"if {{ var(txn.copy) -m beg api: }} ! {{ req.hdr(x-cortex-info) -m found }} ! {{ stopping }}{condition}"
    if any(RULES[backend.protocol].accepts_websockets for backend in table.backends):
        copied += " ! { req.hdr(upgrade) -m found }"
    longest_ms = max((milliseconds(backend.timeout_s) for backend in table.backends), default=1000)
    copy_timeout_s = -(-(longest_ms + TIMEOUT_MARGIN_MS) // 1000)
    return f"""\
  http-request wait-for-body time {milliseconds(body_timeout_s)}ms {copied}
  http-request lua.cortex_copy '{sockets.inside}' {copy_timeout_s} {copied}
"""


def _split_routes(table: RoutingTable) -> str:
    """Return the rule that selects the backend of the API that was drawn."""
    if not table.splits:
        return ""
    return f"  use_backend %[var(txn.slot),map({SLOTS_MAP})] if {{ var(txn.split) -m found }}\n"


def _canary_rules(table: RoutingTable, sockets: GatewaySockets, body_timeout_s: float) -> str:
    """Return the rules that draw whether a request goes to the canary of the API to which it would go.

    A canary that gets copies responds to none. Requests to splitters are not copied to it.
    """
    if not _has_canaries(table):
        return ""
    to = "  http-request set-var(txn.to)"
    of_split = f"{to} var(txn.slot),map({SLOTS_MAP}) if {{ var(txn.split) -m found }}\n" if table.splits else ""
    of_call = f"{to} var(txn.called) if {_CALLED}\n" if grpc_backends(table) else ""
    return f"""\
{to} path,map({ROUTES_MAP})
{to} var(txn.prefix),field(1,|) if {{ var(txn.prefix) -m beg {BACKEND_PREFIX} }}
{of_split}{of_call}\
  http-request set-var-fmt(txn.drawn) %[var(txn.to)]:%[rand(100)]
  http-request set-var(txn.canary) var(txn.drawn),map({CANARIES_MAP})
  http-request set-var(txn.copy) var(txn.drawn),map({SHADOWS_MAP}) if ! {{ var(txn.split) -m found }}
{check_keys_of_copies(table)}\
{_copy_rules(table, sockets, body_timeout_s, " ! { var(txn.split) -m found }")}\
{forget_keys_of_copies(table)}\
"""


def _canary_routes(table: RoutingTable) -> str:
    """Return the rule that selects the backend that was drawn, unless its last server has just left."""
    return "  use_backend %[var(txn.canary)] if { var(txn.canary),nbsrv gt 0 }\n" if _has_canaries(table) else ""


def _has_canaries(table: RoutingTable) -> bool:
    return any(backend.canary is not None for backend in table.backends)


def _inside(sockets: GatewaySockets) -> str:
    """Return the frontend of requests that the gateway sends to itself; clients can't reach it."""
    return f"""\
frontend {INSIDE_FRONTEND}
  bind 'unix@{sockets.inside}' mode 600 proto h1
  unique-id-format %[req.hdr(x-cortex-request-id)]
  http-request set-var(txn.backend) req.hdr(x-cortex-backend)
  http-request del-header x-cortex-backend
  http-request set-var(txn.held) req.hdr(x-cortex-held)
  http-request del-header x-cortex-held
  use_backend %[var(txn.backend)]
  default_backend {UNKNOWN_BACKEND}
"""


def _refusals(sockets: GatewaySockets) -> str:
    """Return the frontend of requests that the gateway refuses before their body is complete."""
    return f"""\
frontend {REFUSALS_SERVER}
  bind 'unix@{sockets.refusals}' mode 600 proto h1
  timeout client {_REFUSAL_IDLE_S}s
  filter lua.cortex_bounded
  http-request use-service lua.cortex_drain
"""


def _fixed_sections(table: RoutingTable, settings: GatewaySettings, sockets: GatewaySockets) -> tuple[str, ...]:
    return (
        f"""\
backend {UNKNOWN_BACKEND}
{refuse(404, json_error("no API has the path %[path,bytes(0,200),json(utf8ps)]"), "TRUE")}\
{_unknown_grpc(table)}{END_OF_REFUSALS}\
{refusals_server(sockets.refusals)}""",
        f"""\
backend {HEALTH_BACKEND}
{_LIVE}\
  http-request lua.cortex_ready
""",
        f"""\
backend cortex-successor
  timeout server {TIMEOUT_MAX_MS}ms
{_of_successor(table, _TO_SUCCESSOR)}\
  server successor 'unix@{sockets.successor}'
""",
        f"""\
backend {DRAINING_BACKEND}
  server {DRAINING_SERVER.partition("/")[2]} 'unix@{sockets.successor}' disabled
""",
        f"""\
backend {PROBES_BACKEND}
  stick-table type string len 250 size {2 * len(table.backends) + 1} store gpc(1)
""",
        *_operator_section(table),
        *_keyed_section(table, settings),
        *_grpc_section(table, settings),
    )


def _operator_section(table: RoutingTable) -> tuple[str, ...]:
    """Return the section whose health checks tell whether the operator runs; none if no API needs it to answer."""
    socket = next((backend.jobs_socket for backend in table.backends if backend.jobs_socket), "")
    check = "check inter 2s downinter 500ms rise 1 fall 1"
    return (f"backend {OPERATOR_BACKEND}\n  server operator 'unix@{socket}' {check}\n",) if socket else ()


def _has_keys(table: RoutingTable) -> bool:
    return bool(keyed_splits(table)) or any(backend.needs_key for backend in table.backends)


def _keyed_section(table: RoutingTable, settings: GatewaySettings) -> tuple[str, ...]:
    """Return the section of the table of open requests with a key; none if no API requires one."""
    if not _has_keys(table):
        return ()
    size = 2 * settings.max_connections
    return (f"backend {KEYED_BACKEND}\n  stick-table type string len 80 size {size} expire 1s store conn_cur\n",)


def _grpc_section(table: RoutingTable, settings: GatewaySettings) -> tuple[str, ...]:
    """Return the sections of two tables: failed calls by backend (4xx, 5xx), and open requests of HTTP/2 by address."""
    size = len(grpc_backends(table))
    streams = f"stick-table type ipv6 size {settings.max_connections} expire 1m store conn_cur"
    return (
        (
            f"backend {GRPC_BACKEND}\n  stick-table type string len 250 size {size} store gpc(2)\n",
            f"backend {_STREAMS_BACKEND}\n  {streams}\n",
        )
        if size
        else ()
    )


def _unknown_grpc(table: RoutingTable) -> str:
    """Return the rules for gRPC calls that lead nowhere."""
    if not grpc_backends(table):
        return ""
    error = grpc_error(404, "no API has the path %[path,bytes(0,200)]")
    return SET_GRPC + GRPC_RESPONSES + refuse(404, error, "{ var(txn.grpc) -m found }")


def _v2_section(table: RoutingTable, sockets: GatewaySockets) -> str:
    """Return the section of the Open Inference Protocol's paths at the root that name no API."""
    answers = {
        "/v2/health/live": '{"live":true}',
        "/v2/models /v2/models/": json.dumps({"models": v2_names(table)}),
        "/v2 /v2/": json.dumps({"name": "cortex", "version": __version__, "extensions": EXTENSIONS}),
    }
    lines = [
        f"  http-request return status 200 content-type application/json string '{body}' if {{ path -m str {paths} }}\n"
        for paths, body in answers.items()
    ]
    refused = refuse(405, json_error("use GET"), "! { method GET HEAD }") + END_OF_REFUSALS
    ready = "  http-request lua.cortex_ready if { path /v2/health/ready }\n"
    return f"backend {V2_BACKEND}\n{refused}{''.join(lines)}{ready}{refusals_server(sockets.refusals)}"
