"""Owns the text of each API's section in HAProxy's configuration; does no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.gateway import tcp
from cortex.gateway.access import section_log
from cortex.gateway.addresses import server_address
from cortex.gateway.maps import HOLDS_MAP, ROUTES_MAP, UNAVAILABLE_MAP, backend_name
from cortex.gateway.routes import Backend, Server

#: How much longer than an API's timeout the gateway waits: the replica ends a late call itself, and says so.
TIMEOUT_MARGIN_MS = 1000
#: HAProxy's clock counts milliseconds in 31 bits.
TIMEOUT_MAX_MS = 2_000_000_000
#: The operator may be silent so long: it lists the files of a submission, or stores the last of an upload.
JOBS_TIMEOUT_S = 600.0
#: Requests that the operator has open for one API at most.
_JOBS_CONNECTIONS = 1000
#: How long others wait for one of these connections.
_JOBS_QUEUE_S = 5.0
_AWAY = "operator_unavailable"
#: So many requests may wait for an API's first replica at least, or what its queue may have if that is more.
HELD_MIN = 1024
#: Where a request goes that waits for a replica. Every section of an API has it; it is never counted as a replica.
HOLD_SERVER = "cortex-hold"

#: A replica that is gone with its socket is left at the first refused connection: it has the fewest requests, so it
#: would be tried before all others until its removal.
_SERVER_CHECK = "check inter 5s downinter 500ms rise 1 fall 1 observe layer4 error-limit 1 on-error mark-down"


@dataclass(frozen=True)
class Sockets:
    """The gateway's own unix sockets."""

    stats: str  #: commands
    successor: str  #: requests from a worker that was reloaded away
    inside: str  #: requests of the gateway's own: held ones, and copies for a shadow; they name their backend


def milliseconds(seconds: float) -> int:
    """Write a time as HAProxy takes it."""
    return min(max(1, round(seconds * 1000)), TIMEOUT_MAX_MS)


def json_error(message: str) -> str:
    """Write the content of an answer that the gateway gives itself."""
    return f"""content-type application/json lf-string '{{"error":"{message}","request_id":"%[unique-id]"}}'"""


def server_options(server: Server) -> str:
    """Say everything about a server; servers added at run time know no defaults, so all of it is said both times."""
    if not is_unix(server):
        return f"{server_address(server.socket)} maxconn {capacity(server)} {tcp.CHECK}"
    path = server.socket.replace(" ", r"\ ")  # read alike by the configuration and the socket
    return f"unix@{path} maxconn {capacity(server)} {_SERVER_CHECK}"


def is_unix(server: Server) -> bool:
    """Tell whether a server is at a path of this machine."""
    return server.socket.startswith("/")


def capacity(server: Server) -> int:
    """Return the limit HAProxy is given: 0 would mean no limit to it."""
    return max(1, server.capacity)


def servers(backend: Backend) -> str:
    """Write the servers that the section of an API ends with."""
    return "".join(f"  server {server.name} {server_options(server)}\n" for server in backend.servers)


def section(backend: Backend, sockets: Sockets, body_timeout_s: float, first: str = "") -> str:
    """Write the section of an API, its servers left out. `first` are rules that come before its own."""
    if backend.jobs_socket:
        return _jobs_section(backend, first)
    return _calls_section(backend, sockets, body_timeout_s, first)


def tcp_rules(backend: Backend, secret: str) -> str:
    """Write what the section of an API begins with if its replicas are reached over TCP."""
    # With a secret they may come to be, which is to change nothing that needs a reload.
    if backend.jobs_socket or not (secret or any(not is_unix(server) for server in backend.servers)):
        return ""
    return tcp.section_rules(secret, json_error(f"the URL is longer than {tcp.URL_MAX_BYTES} bytes"))


def error_of(backend: Backend, message: str, kind: str) -> str:
    """Write the content of an answer that the gateway gives in place of an API, in that API's form."""
    return _jobs_error(message, kind) if backend.jobs_socket else json_error(message)


def _jobs_section(backend: Backend, first: str) -> str:
    name = backend_name(backend)
    away = "the operator is not running; jobs can't be submitted, seen or stopped now"
    full = f"{_JOBS_CONNECTIONS} requests are open at this endpoint already; try again once some of them are answered"
    ended = "the operator ended before it answered; look for the job before you submit it again"
    silent = f"the operator did not answer within {JOBS_TIMEOUT_S:g} s"
    # HAProxy gives one answer to those that were refused, and to those that waited too long for one of the connections.
    is_full = f"srv_conn({name}/operator),div({_JOBS_CONNECTIONS})"
    kind, refused = (f'%[{is_full},iif("{yes}","{no}")]' for yes, no in (("busy", _AWAY), (full, away)))
    return f"""\
backend {name}
  timeout queue {milliseconds(_JOBS_QUEUE_S)}ms
  timeout server {milliseconds(JOBS_TIMEOUT_S)}ms
{section_log(backend)}{first}\
  http-request set-header x-cortex-api {backend.api}
  http-request set-header x-cortex-job %[path,field(-1,/)] unless {{ path,map({ROUTES_MAP}) -m found }}
  http-error status 502 {_jobs_error(ended)}
  http-error status 503 {_jobs_error(refused, kind)} hdr Retry-After 1
  http-error status 504 {_jobs_error(silent)}
  server operator 'unix@{backend.jobs_socket}' maxconn {_JOBS_CONNECTIONS}
"""


def _jobs_error(message: str, kind: str = _AWAY) -> str:
    """Write an error in the form of the operator's own, which answers everything else below these paths."""
    body = f'{{"kind":"{kind}","message":"{message}","error":"{message}","request_id":"%[unique-id]"}}'
    quoted = body.replace("'", r"'\''")
    return f"content-type application/json lf-string '{quoted}'"


def _calls_section(backend: Backend, sockets: Sockets, body_timeout_s: float, first: str) -> str:
    timeout_ms = milliseconds(backend.timeout_s)
    # The clock of the request and that of its time-out are two; a hair less than the time-out is the time-out.
    late_ms = max(1, timeout_ms - 5)
    seconds = f"{backend.timeout_s:g} s"
    late = f"{{ status 503 }} {{ date(0,ms),sub(txn.arrived) ge {late_ms} }}"
    waited = (
        f'%[date(0,ms),sub(txn.arrived),div({late_ms}),iif("timed out after {seconds} in the queue",'
        f'"no replica could be reached")]'
    )
    return f"""\
backend {backend_name(backend)}
  timeout queue {timeout_ms}ms
  timeout server {min(timeout_ms + TIMEOUT_MARGIN_MS, TIMEOUT_MAX_MS)}ms
{section_log(backend)}{first}\
  http-request return status 413 {json_error(f"the body is larger than {backend.max_body_bytes} bytes")} \
if {{ req.body_size gt {backend.max_body_bytes} }}
  http-request wait-for-body time {milliseconds(body_timeout_s)}ms
  http-request set-var(txn.arrived) date(0,ms)
{_hold(backend, sockets, timeout_ms)}\
{_queue_limit(max(0, backend.max_queue))}
  http-error status 503 {json_error(waited)} hdr Retry-After 1
  http-error status 504 {json_error(f"timed out after {seconds}")}
  http-after-response del-header retry-after if {late}
  http-after-response set-status 504 reason 'Gateway Timeout' if {late}
"""


def _hold(backend: Backend, sockets: Sockets, timeout_ms: int) -> str:
    """Refuse requests that find no server, or have them wait for one.

    They wait behind a server that only a rule chooses, so that the gateway notices when their client goes. That server
    is the gateway itself, or the worker that took over from this one: they enter this section there once more, stay at
    its first rule until there is a server, and go on.
    """
    limit = 2 * max(HELD_MIN, backend.max_queue)  # each of them is in this section twice
    reason = f"%[be_name,map({UNAVAILABLE_MAP})]"
    late = json_error(f"timed out after {backend.timeout_s:g} s, while no replica was ready: {reason}")
    return f"""\
  http-request lua.cortex_hold {timeout_ms} if {{ nbsrv eq 0 }} {{ var(txn.held) -m found }}
  http-request return status 504 {late} if {{ nbsrv eq 0 }} {{ var(txn.held) -m str late }}
  http-request return status 503 {json_error(f"no replica is ready: {reason}")} hdr Retry-After 1 \
if {{ nbsrv eq 0 }} ! {{ be_name,map({HOLDS_MAP}) -m str 1 }}
  http-request return status 503 {json_error("the queue is full")} hdr Retry-After 1 \
if {{ nbsrv eq 0 }} {{ be_conn gt {limit} }} ! {{ var(txn.held) -m found }}
  # What is left at this place has lost its client, which ends the wait.
  http-request return status 400 {json_error("the client went away")} \
if {{ nbsrv eq 0 }} {{ var(txn.held) -m found }} ! {{ stopping }}
  http-request set-header x-cortex-backend %[be_name] if {{ nbsrv eq 0 }}
  http-request set-header x-cortex-held 1 if {{ nbsrv eq 0 }}
  option persist
  use-server {HOLD_SERVER} if {{ nbsrv eq 0 }}
  server {HOLD_SERVER} 'unix@{sockets.inside}' disabled pool-max-conn 0
"""


def _queue_limit(limit: int) -> str:
    full = f"http-request return status 503 {json_error('the queue is full')} hdr Retry-After 1"
    # Those that waited for the first replica are let in all at once.
    new = "! { nbsrv eq 0 } ! { var(txn.held) -m found }"
    if limit == 0:
        return f"  {full} if {{ be_conn_free le 0 }} {new}"
    # The limit is per ready replica process; the first condition is cheap and nearly always false.
    return f"""\
  http-request set-var(txn.limit) nbsrv,mul({limit}) if {{ queue ge {limit} }}
  {full} if {{ queue ge {limit} }} {{ queue,sub(txn.limit) ge 0 }} {new}"""
