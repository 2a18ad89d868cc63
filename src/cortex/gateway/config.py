"""Owns HAProxy's configuration text and map files, as a pure function of the routing table; does no I/O.

Text of users (why an API is unavailable, endpoints) goes into map files only, never into the configuration, so
that nothing they write is ever read as a directive.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from cortex.errors import GatewayError
from cortex.gateway.routes import Backend, RoutingTable, Server

CONFIG_FILE = "haproxy.cfg"
ROUTES_MAP = "routes.map"
INFO_MAP = "info.map"
UNAVAILABLE_MAP = "unavailable.map"
BACKEND_PREFIX = "api:"

UNAVAILABLE_MAX_LENGTH = 1000
#: A whole request or answer of up to 1 MiB waits in the gateway while its client is slow, not in a replica. Pages of
#: a buffer cost memory only once they are written.
BUFFER_BYTES = 1024 * 1024 + 64 * 1024
#: Buffers kept for reuse. Without room for a dozen of them each request would map and unmap its own: twice the CPU.
BUFFER_CACHE_BYTES = 16 * 1024 * 1024
HEADERS_MAX_BYTES = 64 * 1024
#: How much longer than an API's timeout the gateway waits: the replica ends a late call itself, and says so.
TIMEOUT_MARGIN_MS = 1000
#: HAProxy's clock counts milliseconds in 31 bits.
TIMEOUT_MAX_MS = 2_000_000_000

#: A replica that is gone with its socket is left at the first refused connection: it has the fewest requests, so it
#: would be tried before all others until its removal.
_SERVER_CHECK = "check inter 5s rise 1 fall 1 observe layer4 error-limit 1 on-error mark-down"
_HEALTH_PATHS = ("/livez", "/readyz", "/healthz")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_ENDPOINT = re.compile(r"/[!-~]{0,1000}")
_HOST = re.compile(r"[A-Za-z0-9_.:*-]{1,255}")
_PATH = re.compile(r"/[^\x00-\x1f\x7f-\x9f\u2028\u2029'\"\\$#,]{1,106}")


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


@dataclass(frozen=True)
class Rendered:
    """The files HAProxy reads, and a digest of all in them that can't be changed while it runs."""

    config: str
    routes: str
    info: str
    unavailable: str
    structure: str


@dataclass(frozen=True)
class Sockets:
    """The gateway's own unix sockets."""

    stats: str  #: commands
    successor: str  #: requests from a worker that was reloaded away


def render(table: RoutingTable, settings: GatewaySettings, sockets: Sockets) -> Rendered:
    """Write the configuration for `table`. Raises: GatewayError for a name, endpoint or path that is not plain."""
    for backend in table.backends:
        _check_backend(backend)
    frame = [
        _global(settings, sockets, _longest_timeout_ms(table)),
        _defaults(settings),
        _frontend(settings, sockets),
        *_fixed_backends(sockets),
    ]
    sections = [_backend(backend, settings) for backend in table.backends]
    routes, info = _routes(table)
    lines = ["".join(f"{path} {name}\n" for path, name in sorted(paths.items())) for paths in (routes, info)]
    structure = hashlib.sha256("\0".join([*frame, *sections, *lines]).encode()).hexdigest()[:32]
    frame[0] += f"  description {structure}\n"
    with_servers = [text + _servers(backend) for text, backend in zip(sections, table.backends, strict=True)]
    unavailable = "".join(f"{backend_name(b.api)} {unavailable_text(b)}\n" for b in table.backends)
    return Rendered("\n".join([*frame, *with_servers]), lines[0], lines[1], unavailable, structure)


def backend_name(api: str) -> str:
    """Name an API's backend in HAProxy."""
    return BACKEND_PREFIX + api


def server_options(server: Server) -> str:
    """Say everything about a server; servers added at run time know no defaults, so all of it is said both times."""
    path = server.socket.replace(" ", r"\ ")  # read alike by the configuration and the socket
    return f"unix@{path} maxconn {capacity(server)} {_SERVER_CHECK}"


def capacity(server: Server) -> int:
    """Return the limit HAProxy is given: 0 would mean no limit to it."""
    return max(1, server.capacity)


def unavailable_text(backend: Backend) -> str:
    r"""Write the reason as the inside of a JSON string: printable ASCII on one line, as map files need it."""
    text = backend.unavailable.strip()[:UNAVAILABLE_MAX_LENGTH].strip() or "no reason is known"
    return json.dumps(text)[1:-1].replace("\x7f", "\\u007f")


def _check_backend(backend: Backend) -> None:
    checks = [("API name", _NAME, backend.api), ("endpoint", _ENDPOINT, backend.endpoint)]
    for server in backend.servers:
        checks += [("server name", _NAME, server.name), ("socket path", _PATH, server.socket)]
    for what, pattern, value in checks:
        _check(what, pattern, value)


def _check(what: str, pattern: re.Pattern[str], value: str) -> None:
    if not pattern.fullmatch(value):
        raise GatewayError(f"{what} {value!r} can't be given to HAProxy: it is too long or has unusual characters")


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), TIMEOUT_MAX_MS)


def _longest_timeout_ms(table: RoutingTable) -> int:
    return max((_milliseconds(backend.timeout_s) for backend in table.backends), default=1000)


def _json_error(message: str) -> str:
    return f"""content-type application/json lf-string '{{"error":"{message}","request_id":"%[unique-id]"}}'"""


def _global(settings: GatewaySettings, sockets: Sockets, longest_ms: int) -> str:
    for path in (sockets.stats, sockets.successor):
        _check("socket path", _PATH, path)
    # A worker that was reloaded away may still have a request in its queue and then in a replica, after the
    # keep-alive of the connection that sent it.
    hard_stop_ms = min(2 * longest_ms + 2 * TIMEOUT_MARGIN_MS + _milliseconds(settings.keep_alive_s), TIMEOUT_MAX_MS)
    return f"""\
global
  master-worker
  nbthread {settings.threads}
  maxconn {settings.max_connections}
  noreuseport
  hard-stop-after {hard_stop_ms}ms
  mworker-max-reloads 100
  tune.bufsize {BUFFER_BYTES}
  tune.memory.hot-size {BUFFER_CACHE_BYTES}
  stats socket '{sockets.stats}' mode 600 level admin expose-fd listeners
"""


def _defaults(settings: GatewaySettings) -> str:
    client_ms = _milliseconds(settings.client_timeout_s)
    return f"""\
defaults
  mode http
  balance leastconn
  timeout client {client_ms}ms
  timeout connect 5s
  timeout server 60s
  timeout tunnel 1h
  timeout http-request {_milliseconds(settings.header_timeout_s)}ms
  timeout http-keep-alive {_milliseconds(settings.keep_alive_s)}ms
  # A caller that hangs up is taken out of the queue, and its call in the replica is cancelled.
  option abortonclose
  # A reload closes an idle connection after its next answer, not under the hands of a client about to use it.
  option idle-close-on-response
  option http-no-delay
  # Only what never reached a replica is sent again: user code may have seen the rest.
  retry-on conn-failure
  option redispatch 1
  http-reuse always
  http-error status 400 {_json_error("bad request")}
  http-error status 403 {_json_error("forbidden")}
  http-error status 404 {_json_error("not found")}
  http-error status 408 {_json_error("the request did not come in in time")}
  http-error status 413 {_json_error("the request is too large")}
  http-error status 500 {_json_error("the gateway failed")}
  http-error status 502 {_json_error("the replica closed the connection before it answered")}
  http-error status 503 {_json_error("no replica could be reached")} hdr Retry-After 1
  http-error status 504 {_json_error("timed out")}
"""


def _frontend(settings: GatewaySettings, sockets: Sockets) -> str:
    _check("host", _HOST, settings.host)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    cors = (
        "hdr access-control-allow-methods 'GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS'"
        " hdr access-control-allow-headers '*, Authorization' hdr access-control-max-age 86400"
    )
    return f"""\
frontend gateway
  bind {host}:{settings.port} proto h1
  bind 'unix@{sockets.successor}' mode 600 proto h1
  unique-id-format %[date(0,ms)]-%pid-%rt
  unique-id-header X-Cortex-Request-ID
  http-request return status 204 {cors} if {{ method OPTIONS }}
  http-request deny deny_status 400 if {{ req.hdrs_bin,length gt {HEADERS_MAX_BYTES} }}
  http-request del-header x-cortex- -m beg
  http-request set-header x-cortex-info 1 if {{ path_end /info }} {{ path,map({INFO_MAP}) -m found }}
  http-after-response set-header x-cortex-request-id %[unique-id] unless {{ be_name -m str cortex-successor }}
  http-after-response set-header access-control-allow-origin *
  # After a reload this worker's servers can't be changed any more. What still comes, on connections that were idle, is
  # for the worker that took over.
  use_backend cortex-successor if {{ stopping }}
  use_backend %[path,map({ROUTES_MAP})]
  default_backend cortex-unknown
"""


def _fixed_backends(sockets: Sockets) -> tuple[str, ...]:
    return (
        f"""\
backend cortex-unknown
  http-request return status 404 {_json_error("no API has the path %[path,bytes(0,200),json(utf8ps)]")}
""",
        """\
backend cortex-health
  http-request return status 200 content-type application/json string '{"ok": true}'
""",
        f"""\
backend cortex-successor
  timeout server {TIMEOUT_MAX_MS}ms
  server successor 'unix@{sockets.successor}'
""",
    )


def _backend(backend: Backend, settings: GatewaySettings) -> str:
    timeout_ms = _milliseconds(backend.timeout_s)
    # The clock of the request and that of its time-out are two; a hair less than the time-out is the time-out.
    late_ms = max(1, timeout_ms - 5)
    seconds = f"{backend.timeout_s:g} s"
    late = f"{{ status 503 }} {{ date(0,ms),sub(txn.arrived) ge {late_ms} }}"
    waited = (
        f'%[date(0,ms),sub(txn.arrived),div({late_ms}),iif("timed out after {seconds} in the queue",'
        f'"no replica could be reached")]'
    )
    return f"""\
backend {backend_name(backend.api)}
  timeout queue {timeout_ms}ms
  timeout server {min(timeout_ms + TIMEOUT_MARGIN_MS, TIMEOUT_MAX_MS)}ms
  http-request return status 413 {_json_error(f"the body is larger than {backend.max_body_bytes} bytes")} \
if {{ req.body_size gt {backend.max_body_bytes} }}
  http-request wait-for-body time {_milliseconds(settings.body_timeout_s)}ms
  http-request set-var(txn.arrived) date(0,ms)
  http-request return status 503 {_json_error(f"no replica is ready: %[be_name,map({UNAVAILABLE_MAP})]")} \
hdr Retry-After 1 if {{ nbsrv eq 0 }}
{_queue_limit(max(0, backend.max_queue))}
  http-error status 503 {_json_error(waited)} hdr Retry-After 1
  http-error status 504 {_json_error(f"timed out after {seconds}")}
  http-after-response del-header retry-after if {late}
  http-after-response set-status 504 reason 'Gateway Timeout' if {late}
"""


def _queue_limit(limit: int) -> str:
    full = f"http-request return status 503 {_json_error('the queue is full')} hdr Retry-After 1"
    if limit == 0:
        return f"  {full} if {{ be_conn_free le 0 }}"
    # The limit is per ready replica process; the first condition is cheap and nearly always false.
    return f"""\
  http-request set-var(txn.limit) nbsrv,mul({limit}) if {{ queue ge {limit} }}
  {full} if {{ queue ge {limit} }} {{ queue,sub(txn.limit) ge 0 }}"""


def _servers(backend: Backend) -> str:
    return "".join(f"  server {server.name} {server_options(server)}\n" for server in backend.servers)


def _routes(table: RoutingTable) -> tuple[dict[str, str], dict[str, str]]:
    """Map every path exactly; an endpoint of its own goes before what another API's endpoint implies.

    The second result holds the paths that ask for a summary of an API instead of calling it.
    """
    routes: dict[str, str] = {}
    info: dict[str, str] = {}
    for suffix in ("", "/", "/info"):
        for backend in table.backends:
            path = backend.endpoint.rstrip("/") + suffix or "/"
            if path not in routes:
                routes[path] = backend_name(backend.api)
                if suffix == "/info":
                    info[path] = backend_name(backend.api)
    for path in _HEALTH_PATHS:
        routes.setdefault(path, "cortex-health")
    return routes, info
