"""The `backend` section of each API in HAProxy's configuration: API keys, limits, holding, queue and servers. Pure.

Rules of a section apply in this order: check the API key, refuse a head or body that is too large, refuse the request
if there is no replica and none will come, wait for the whole body, hold the request while there is no replica (see
`config`), refuse it if the queue is full, send it to a server. Each condition costs every request a fraction of a
microsecond, so `allow` skips the rules for rare cases.

API keys: HAProxy checks them itself, against a map that commands change, so keys work while the operator is away. It
looks up the SHA-256 of the received key, never the key. The duration of a lookup therefore depends on a hash that no
caller can choose, and the map, the log and HAProxy's memory contain nothing that can be used as a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cortex.gateway.access_log import CLIENT_CLOSED_REQUEST, final_status, section_log
from cortex.gateway.addresses import server_address
from cortex.gateway.maps import (
    DOCS_BACKEND,
    DOCS_MAP,
    HOLDS_MAP,
    KEYS_MAP,
    ROUTES_MAP,
    UNAVAILABLE_MAP,
    backend_name,
)
from cortex.gateway.protocols import (
    DETECTED_ERRORS,
    END_OF_REFUSALS,
    GRPC_BACKEND,
    GRPC_RESPONSES,
    GRPC_STATUSES,
    KEYED_BACKEND,
    PROBES_BACKEND,
    RULES,
    ErrorContent,
    Protocol,
    json_error,
    refusals_server,
    refuse,
)
from cortex.gateway.routes import ApiBackend, RoutingTable, Server

#: The gateway waits this much longer than an API's timeout, so that the replica can end a late call and respond.
TIMEOUT_MARGIN_MS = 1000
#: HAProxy stores milliseconds in 31 bits.
TIMEOUT_MAX_MS = 2_000_000_000

#: Timeout of the operator's responses: it may list the files of a submission, or store the last bytes of an upload.
JOBS_TIMEOUT_S = 600.0
#: Maximum number of requests of one API that are open at the operator.
_JOBS_CONNECTIONS = 1000
#: Time that further requests wait for one of these connections.
_JOBS_QUEUE_S = 5.0
_OPERATOR_UNAVAILABLE = "operator_unavailable"
#: A client may end its side of the connection after the request (RFC 9112, 9.6), which the gateway can't distinguish
#: from a disconnect. Nothing is gained by aborting requests to the operator, which finishes them in any case.
_ANSWER_HALF_CLOSED = "  no option abortonclose\n"
#: Timeout of documentation, and the maximum number of open requests for it.
_DOCS_TIMEOUT_S = 30.0
_DOCS_CONNECTIONS = 100

#: Minimum limit of the requests held for an API's first replica; a larger queue limit of the API raises it.
HELD_MIN = 1024
#: Server to which held requests go: the gateway itself. Each section of an API has it; it never counts as a replica.
HOLD_SERVER = "cortex-hold"
_UNAVAILABLE_REASON = f"%[be_name,map({UNAVAILABLE_MAP})]"
_HOLDS_NONE = f"{{ nbsrv eq 0 }} ! {{ be_name,map({HOLDS_MAP}) -m str 1 }}"
#: The frontend of requests that the gateway sends to itself.
INSIDE_FRONTEND = "cortex-inside"

#: The first refused connection marks a server as down. A dead replica has the fewest requests, so HAProxy would try
#: it before all others until the operator removes it.
_UNIX_CHECK = "check inter 5s downinter 500ms rise 1 fall 1 observe layer4 error-limit 1 on-error mark-down"
_TCP_CHECK = "check inter 1s fastinter 500ms fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down"
#: Replicas over TCP: a machine that vanished does not refuse connections. Until a check fails, each request that needs
#: a new connection to it waits this long, and then goes to another replica.
_TCP_CONNECT_TIMEOUT_MS = 1000
#: Limits of the head of a request. A supervisor on another machine reads it before it admits a connection, and expects
#: at most 160 KiB; HAProxy itself has larger limits, beyond which it answers with a page of its own.
HEAD_MAX_BYTES = 64 * 1024
HEAD_MAX_COUNT = 1000

#: Requests to the services that every gRPC API has: health checks and reflection.
IS_GRPC_TOOL = "{ path_beg /grpc.health.v1. /grpc.reflection.v1 }"
#: The stream of health checks, which the gateway itself answers.
_WATCH = (
    "  http-request use-service lua.cortex_watch if { path /grpc.health.v1.Health/Watch } { var(txn.grpc) -m found }\n"
)

_KEY_MISSING = "this API needs a key: send it as Authorization: Bearer KEY, or as X-API-Key: KEY"
_KEY_UNKNOWN = "the API key is unknown or was revoked; create another one with cortex keys create"
_KEY_OF_OTHERS = "the API key is only valid for other APIs"
#: Counter that tracks requests with a key. Others track APIs (0, 1), addresses (2) and requests of HTTP/2 (3).
KEYED_COUNTER = 4
_KEYED_SPLIT = "keyed-split"
_KEYED_CANARY = "keyed-canary"
#: A request that a canary gets a copy of, and that did not come through a splitter.
_COPIED = "{ var(txn.copy) -m beg api: } ! { var(txn.split) -m found }"
_SPLITS_PER_LINE = 50
#: Callers may send a key to an API that requires none, or in another place. User code would receive it, and log it.
_MAY_HAVE_KEYS = ("{ req.hdrs -m sub ck_ }", "{ query -m sub ck_ }")
#: Requests that the gateway sends to itself were checked when they came from the client. Their frontend sets this
#: variable, and asking for it is cheaper than for the name of the frontend.
_FROM_CLIENT = "! { var(txn.backend) -m found }"

#: Only applications have WebSockets. If a request asks for another upgrade, such as that of Java's client to HTTP/2,
#: the replica's parser would skip a body of unknown length, and read it as further requests.
_NO_UPGRADE = "  http-request del-header upgrade"
_WEBSOCKET = "{ method GET } { req.hdr(upgrade) -i websocket }"
_NO_BODY = "{ req.body_size eq 0 } ! { req.hdr(transfer-encoding) -m found }"
_WEBSOCKETS_ONLY = f"{_NO_UPGRADE} unless {_WEBSOCKET} {_NO_BODY}\n"

#: Rules for applications: the headers that tell them how the client reached the gateway, instead of the client's own.
#: A request that an old worker passes on after a reload has them in variables, see `config`.
_FORWARDED = f"""\
  http-request del-header x-forwarded- -m beg if {_FROM_CLIENT}
  http-request del-header forwarded if {_FROM_CLIENT}
  option forwardfor if-none
  http-request add-header x-forwarded-for %[var(txn.client)] if {{ var(txn.client) -m found }}
  http-request set-header x-forwarded-proto http if {_FROM_CLIENT}
  http-request set-header x-forwarded-proto https if {{ ssl_fc }}
  http-request set-header x-forwarded-proto %[var(txn.scheme)] if {{ var(txn.scheme) -m found }}
  http-request add-header x-forwarded-host %[req.hdr(host)] if {_FROM_CLIENT} {{ req.hdr(host) -m found }}
"""


@dataclass(frozen=True)
class GatewaySockets:
    """The gateway's own unix sockets."""

    stats: str  #: commands
    successor: str  #: requests that old workers pass on after a reload
    inside: str  #: requests that the gateway sends to itself: held ones, and copies for a shadow
    refusals: str  #: requests that are refused before their body is complete


def section(
    backend: ApiBackend, table: RoutingTable, sockets: GatewaySockets, body_timeout_s: float, keyed: Collection[str]
) -> str:
    """Return the section of an API without its servers. `keyed` is the result of `keyed_splits`."""
    rules = (_key_rules(backend, table, keyed), _head_rules(backend), _hide_keys(backend))
    first = "".join(rules) + _tcp_rules(backend, table.gateway_secret)
    if backend.protocol is Protocol.JOBS:
        return _jobs_section(backend, sockets, first)
    return _calls_section(backend, sockets, body_timeout_s, first)


def servers(backend: ApiBackend) -> str:
    """Return the servers, which end the section of an API."""
    return "".join(f"  server {server.name} {server_options(server, backend.sticky)}\n" for server in backend.servers)


def server_options(server: Server, sticky: bool = False) -> str:
    """Return all options of a server. Servers added by command have no defaults, so nothing is left to defaults.

    With `sticky`, they have a cookie: a hash, so that clients are not sent the names of replicas.
    """
    cookie = f" cookie {hashlib.sha256(server.name.encode()).hexdigest()[:16]}" if sticky else ""
    if not is_unix(server):
        return f"{server_address(server.socket)} maxconn {capacity(server)}{cookie} {_TCP_CHECK}"
    path = server.socket.replace(" ", r"\ ")  # the same escape in the configuration and in commands
    return f"unix@{path} maxconn {capacity(server)}{cookie} {_UNIX_CHECK}"


def is_unix(server: Server) -> bool:
    """Return whether a server listens on a unix socket of this machine."""
    return server.socket.startswith("/")


def capacity(server: Server) -> int:
    """Return the limit of connections for HAProxy, to which 0 would mean no limit."""
    return max(1, server.capacity)


def milliseconds(seconds: float) -> int:
    """Return a time in HAProxy's unit and range."""
    return min(max(1, round(seconds * 1000)), TIMEOUT_MAX_MS)


def keyed_splits(table: RoutingTable) -> tuple[str, ...]:
    """Return the splitters that require a key: because they are set to, or because one of their APIs is.

    The key is checked at the endpoint that was called, so an open splitter would bypass the keys of its APIs.
    """
    keyed = {backend.api for backend in table.backends if backend.needs_key}
    return tuple(
        split.name
        for split in table.splits
        if split.needs_key or any(share.api in keyed for share in (*split.shares, *filter(None, (split.shadow,))))
    )


def splitter_key_rules(keyed: Sequence[str]) -> str:
    """Return the frontend's rules that check keys for splitters, before a request is copied to a shadow."""
    if not keyed:
        return ""
    condition = _KEYED_SPLIT
    return f"""\
{_keyed_split_acl(keyed)}\
{_check_key("/,txn.split", (condition,))}\
  http-request unset-var(txn.copied) if {condition} ! {{ var(txn.key_fits) -m found }}
"""


def check_keys_of_copies(table: RoutingTable) -> str:
    """Return the frontend's rules that check keys before a request is copied to a canary."""
    names = _keyed_canaries(table)
    if not names:
        return ""
    acls = "".join(f"  acl {_KEYED_CANARY} var(txn.to) -m str {name}\n" for name in names)
    return f"""\
{acls}\
  http-request set-var(txn.api) var(txn.to),field(2,:) if {_KEYED_CANARY}
{_check_key("/,txn.api", (_KEYED_CANARY, _COPIED))}\
  http-request unset-var(txn.copy) if {_KEYED_CANARY} ! {{ var(txn.key_fits) -m found }}
"""


def forget_keys_of_copies(table: RoutingTable) -> str:
    """Return the rules after `check_keys_of_copies` and the copy: the section of the API checks keys once more."""
    if not _keyed_canaries(table):
        return ""
    condition = f"{_KEYED_CANARY} ! {{ var(txn.split) -m found }}"
    return "".join(f"  http-request unset-var(txn.{name}) if {condition}\n" for name in ("key", "key_id", "key_fits"))


def _keyed_canaries(table: RoutingTable) -> list[str]:
    return [backend_name(each) for each in table.backends if each.canary is not None and each.needs_key]


# API keys.


def _key_rules(backend: ApiBackend, table: RoutingTable, keyed: Collection[str]) -> str:
    """Return the rules that refuse callers without a valid key; empty for an open API.

    The frontend checks the keys for splitters; requests without one are refused here, so that they count for the API.
    """
    splits = [
        split.name
        for split in table.splits
        if split.name in keyed and any(share.api == backend.api for share in split.shares)
    ]
    if backend.needs_key:
        condition = _FROM_CLIENT
        check = _check_key(f"/{backend.api}", (_FROM_CLIENT, "! { var(txn.split) -m found }"))
    elif splits:
        condition = _KEYED_SPLIT
        check = _keyed_split_acl(splits)
    else:
        return ""
    missing = _error(backend, 401, _KEY_MISSING, "unauthorized")
    unknown = _error(backend, 401, _KEY_UNKNOWN, "unauthorized")
    of_others = _error(backend, 403, _KEY_OF_OTHERS, "forbidden")
    return f"""\
{check}\
{refuse(403, of_others, f"{condition} ! {{ var(txn.key_fits) -m found }}")}\
{refuse(401, unknown, f"{condition} ! {{ var(txn.key_id) -m found }}")}\
{refuse(401, missing, f"{condition} ! {{ var(txn.key) -m found }}")}\
{END_OF_REFUSALS}\
  # Keep the key from user code, and from what it logs.
  http-request del-header x-api-key if {condition}
  http-request del-header authorization if {condition}
{_track_key(backend, condition)}"""


def _track_key(backend: ApiBackend, condition: str) -> str:
    """Return the rules that let the operator find the requests of a key that is revoked.

    Where bodies are not streamed, those are the ones that stream their response.
    """
    name = f'  http-request set-var-fmt(txn.keyed) "%[var(txn.key_id)]/%rt" if {condition}\n'
    track = f"track-sc{KEYED_COUNTER} var(txn.keyed) table {KEYED_BACKEND} if"
    if not RULES[backend.protocol].waits_for_body:
        return f"{name}  http-request {track} {condition}\n"
    return f"{name}  http-response {track} {{ var(txn.keyed) -m found }} ! {{ res.hdr(content-length) -m found }}\n"


def _keyed_split_acl(splits: Sequence[str]) -> str:
    """Return the definition of _KEYED_SPLIT, true for requests to one of `splits`; HAProxy takes 64 words in a line."""
    chunks = (splits[start : start + _SPLITS_PER_LINE] for start in range(0, len(splits), _SPLITS_PER_LINE))
    return "".join(f"  acl {_KEYED_SPLIT} var(txn.split) -m str {' '.join(chunk)}\n" for chunk in chunks)


def _check_key(target: str, conditions: Sequence[str]) -> str:
    """Return the rules that set txn.key to the hash of the received key, and txn.key_id to the id of a known key.

    They set txn.key_fits only if the key is valid for `target`, an argument of HAProxy's converter `concat`.
    """
    when = " ".join(conditions)
    found = "{{ var(txn.key),concat({}),map(" + KEYS_MAP + ") -m found }}"
    return f"""\
  http-request set-var(txn.key) req.fhdr(x-api-key) if {when}
  http-request set-var(txn.key) http_auth_bearer if {when} ! {{ var(txn.key) -m found }}
  http-request set-var(txn.key) var(txn.key),sha2(256),hex if {when}
  http-request set-var(txn.key_id) var(txn.key),map({KEYS_MAP}) if {when}
  http-request set-var(txn.key_fits) bool(true) if {when} {found.format("/*")}
  http-request set-var(txn.key_fits) bool(true) if {when} {found.format(target)}
"""


def _error(backend: ApiBackend, status: int, message: str, kind: str = "") -> ErrorContent:
    """Return an error in the form of the API's protocol."""
    return RULES[backend.protocol].error(status, message, kind)


def _hide_keys(backend: ApiBackend) -> str:
    """Return the rules that remove keys from requests that are not refused, after the limits of the head."""
    not_refused = "! { var(txn.refusal) -m found }"
    condition = " or ".join(f"{not_refused} {each}" for each in _MAY_HAVE_KEYS)
    many = _error(backend, 431, "the request has too many headers with an API key", "too_large")
    refusal = refuse(431, many, "{ var(txn.many_keys) -m found }")
    return f"  http-request lua.cortex_hide_keys if {condition}\n{refusal}"


def _head_rules(backend: ApiBackend) -> str:
    """Return the rules that refuse a head that is too large. The length of all that has arrived is a cheap bound."""
    size = _error(backend, 431, f"the URL and the headers are larger than {HEAD_MAX_BYTES} bytes", "too_large")
    count = _error(backend, 431, f"the request has more than {HEAD_MAX_COUNT} headers", "too_large")
    large = f"{{ req.len gt {HEAD_MAX_BYTES // 2} }}"
    return f"""\
  http-request set-var(txn.url_length) url,length if {large}
{refuse(431, size, f"{large} {{ req.hdrs,length,add(txn.url_length) gt {HEAD_MAX_BYTES} }}")}\
{refuse(431, count, f"{{ req.len gt {HEAD_MAX_COUNT} }} {{ req.fhdr_cnt gt {HEAD_MAX_COUNT} }}")}"""


# Replicas over TCP, on this machine or another.


def _tcp_rules(backend: ApiBackend, secret: str) -> str:
    """Return the rules for an API whose replicas listen over TCP.

    With a secret, any API has them, so that the first replica over TCP needs no reload. Clients can't send the header:
    the frontend deletes all headers with its prefix.
    """
    if backend.protocol is Protocol.JOBS or not (secret or any(not is_unix(server) for server in backend.servers)):
        return ""
    header = f"  http-request set-header x-cortex-gateway {secret}\n" if secret else ""
    # Without keep-alive probes, idle connections to a machine that vanished would be used again.
    return f"""\
  timeout connect {_TCP_CONNECT_TIMEOUT_MS}ms
  option srvtcpka
  srvtcpka-idle 2s
  srvtcpka-intvl 1s
  srvtcpka-cnt 6
{header}"""


# APIs that run jobs.


def _jobs_section(backend: ApiBackend, sockets: GatewaySockets, first: str) -> str:
    name = backend_name(backend)
    away = "the operator is not running; jobs and workloads can't be submitted, queried or stopped now"
    full = f"{_JOBS_CONNECTIONS} requests are open at this endpoint already; try again once some of them are answered"
    ended = "the operator stopped before it responded; check for the job before you submit it again"
    silent = f"the operator did not respond within {JOBS_TIMEOUT_S:g} s"
    # HAProxy has one response for refused connections and for a full queue, so a condition selects the message.
    is_full = f"srv_conn({name}/operator),div({_JOBS_CONNECTIONS})"
    kind, refused = (f'%[{is_full},iif("{yes}","{no}")]' for yes, no in (("busy", _OPERATOR_UNAVAILABLE), (full, away)))
    return f"""\
backend {name}
  timeout queue {milliseconds(_JOBS_QUEUE_S)}ms
  timeout server {milliseconds(JOBS_TIMEOUT_S)}ms
{_ANSWER_HALF_CLOSED}\
{section_log(backend)}{first}{END_OF_REFUSALS}\
  # If the operator died with a connection that was used before, HAProxy would close the client's without a response.
  option http-server-close
  http-request set-header x-cortex-api {backend.api}
  http-request set-header x-cortex-job %[path,field(-1,/)] unless {{ path,map({ROUTES_MAP}) -m found }}
  http-error status 502 {_error(backend, 502, ended, _OPERATOR_UNAVAILABLE).options}
  http-error status 503 {_error(backend, 503, refused, kind).options} hdr Retry-After 1
  http-error status 504 {_error(backend, 504, silent, _OPERATOR_UNAVAILABLE).options}
{final_status(backend)}\
{refusals_server(sockets.refusals)}\
  server operator 'unix@{backend.jobs_socket}' maxconn {_JOBS_CONNECTIONS}
"""


def docs_section(table: RoutingTable) -> tuple[str, ...]:
    """Return the section of the APIs' documentation, which the operator answers; none if there is no documentation."""
    if not table.has_docs:
        return ()
    away = json_error("the operator is not running, so the documentation cannot be shown now; the API is not affected")
    return (
        f"""\
backend {DOCS_BACKEND}
  timeout queue {milliseconds(_JOBS_QUEUE_S)}ms
  timeout server {milliseconds(_DOCS_TIMEOUT_S)}ms
{_ANSWER_HALF_CLOSED}\
  option http-server-close
  http-request set-header x-cortex-docs %[path,map({DOCS_MAP})]
  http-error status 502 {away.options}
  http-error status 503 {away.options} hdr Retry-After 1
  server operator 'unix@{table.operator_socket}' maxconn {_DOCS_CONNECTIONS}
""",
    )


# APIs with replicas.


def _calls_section(backend: ApiBackend, sockets: GatewaySockets, body_timeout_s: float, first: str) -> str:
    timeout_ms = milliseconds(backend.timeout_s)
    # HAProxy measures the timeout by another clock than date(), so allow a few milliseconds less.
    late_ms = max(1, timeout_ms - 5)
    seconds = f"{backend.timeout_s:g} s"
    disconnected = "{ res.hdr(x-cortex-disconnected) -m found }"
    late = f"{{ status 503 }} {{ date(0,ms),sub(txn.arrived) ge {late_ms} }}"
    waited = (
        f'%[date(0,ms),sub(txn.arrived),div({late_ms}),iif("timed out after {seconds} in the queue",'
        f'"no replica could be reached")]'
    )
    cookie = (
        f"  cookie cortex-{backend.api} insert indirect nocache httponly attr SameSite=Lax\n" if backend.sticky else ""
    )
    rules, is_grpc = RULES[backend.protocol], backend.protocol is Protocol.GRPC
    too_large = _error(backend, 413, f"the body is larger than {backend.max_body_bytes} bytes")
    if rules.forwards_client:
        late += " ! { res.hdr(server-timing) -m found }"  # not a response of the application
    if is_grpc:
        late += " ! { res.hdr(content-type) -m beg application/grpc }"  # nor one of the supervisor
    body = "".join(
        [
            _FORWARDED if rules.forwards_client else "",
            _WEBSOCKETS_ONLY if rules.accepts_websockets else f"{_NO_UPGRADE}\n",
            f"  http-request wait-for-body time {milliseconds(body_timeout_s)}ms\n" if rules.waits_for_body else "",
        ]
    )
    # The section of defaults has these in the form of replicas.
    detected = DETECTED_ERRORS.items() if backend.protocol is Protocol.ROUTES else ()
    errors = "".join(
        f"  http-error status {status} {_error(backend, status, text).options}\n" for status, text in detected
    )
    track, watch = (
        (f"  http-request track-sc0 str({backend_name(backend)}) table {GRPC_BACKEND}\n", _WATCH)
        if is_grpc
        else ("", "")
    )
    return f"""\
backend {backend_name(backend)}
  timeout queue {timeout_ms}ms
  timeout server {min(timeout_ms + TIMEOUT_MARGIN_MS, TIMEOUT_MAX_MS)}ms
{_ANSWER_HALF_CLOSED if backend.finishes_calls else ""}\
{cookie}{section_log(backend)}{rules.variables}{track}\
  http-request track-sc1 str({backend_name(backend)}) table {PROBES_BACKEND} if {_is_probe(backend)}
{first}{watch}\
{_unavailable_rules(backend)}\
{refuse(413, too_large, f"{{ req.hdr_val(content-length) gt {backend.max_body_bytes} }}")}\
{END_OF_REFUSALS}{body}\
  http-request set-var(txn.arrived) date(0,ms)
  http-request allow if {{ nbsrv gt 0 }} {_has_room(backend)}
{_hold(backend, sockets, timeout_ms)}\
{_queue_limit(backend)}{END_OF_REFUSALS}\
{refusals_server(sockets.refusals)}\
  use-server {HOLD_SERVER} if {{ nbsrv eq 0 }}
  server {HOLD_SERVER} 'unix@{sockets.inside}' disabled pool-max-conn 0
  # User code may send such headers; the second pass has removed them.
  http-response del-header x-cortex- -m beg unless {{ srv_name {HOLD_SERVER} }}
  # HAProxy's response if the client disconnects while the replica has the request.
  http-error status 400 {_error(backend, 400, "the client disconnected").options} hdr x-cortex-disconnected 1
  http-error status 503 {_error(backend, 503, waited).options} hdr Retry-After 1
  http-error status 504 {_error(backend, 504, f"timed out after {seconds}").options}
{errors}{final_status(backend)}\
  http-after-response allow if {{ status lt 400 }}
  http-after-response sc-inc-gpc(0,1) if {{ status 503 }} {{ sc1_tracked }}
  http-after-response set-status {CLIENT_CLOSED_REQUEST} if {{ status 400 }} {disconnected}
  http-after-response del-header x-cortex-disconnected if {{ status {CLIENT_CLOSED_REQUEST} }}
  http-after-response del-header retry-after if {late}
{f"  http-after-response set-header grpc-status {GRPC_STATUSES[504]} if {late}{chr(10)}" if is_grpc else ""}\
  http-after-response set-status 504 reason 'Gateway Timeout' if {late}
{final_status(backend)}{GRPC_RESPONSES if is_grpc else ""}"""


def _unavailable_rules(backend: ApiBackend) -> str:
    """Return the rules that refuse requests while no server is up and none is about to be."""
    error = _unavailable(backend)
    # A probe must neither wait nor start a replica.
    probe = replace(error, refusal=error.refusal.replace('{"error":', '{"ready":false,"error":'))
    return refuse(503, error, _HOLDS_NONE) + refuse(503, probe, f"{{ nbsrv eq 0 }} {_is_probe(backend)}")


def _is_probe(backend: ApiBackend) -> str:
    """Return the condition that a request asks whether the API is ready."""
    is_grpc = backend.protocol is Protocol.GRPC
    return IS_GRPC_TOOL if is_grpc else "{ path_end /ready } { path_sub /v2/ } { var(txn.prefix) -m found }"


def _unavailable(backend: ApiBackend) -> ErrorContent:
    return _error(backend, 503, f"no replica is ready: {_UNAVAILABLE_REASON}")


def _hold(backend: ApiBackend, sockets: GatewaySockets, timeout_ms: int) -> str:
    """Return the rules that hold or refuse a request while no server is up; see `config` for the two passes."""
    limit = 2 * max(HELD_MIN, backend.max_queue)  # each held request is in this section twice
    late = _error(
        backend, 504, f"timed out after {backend.timeout_s:g} s, while no replica was ready: {_UNAVAILABLE_REASON}"
    )
    full = _error(backend, 503, "the queue is full")
    held = "{ nbsrv eq 0 } { var(txn.held) -m found }"
    return f"""\
  # Second pass: wait here. If the wait ends early, the client has disconnected, or the API holds no more requests.
  http-request lua.cortex_hold {timeout_ms} if {held}
{refuse(503, full, f"{{ nbsrv eq 0 }} {{ be_conn gt {limit} }} ! {{ var(txn.held) -m found }}")}\
{refuse(400, _error(backend, 400, "the client went away"), f"{held} ! {{ stopping }}")}\
{refuse(503, _unavailable(backend), _HOLDS_NONE)}\
{refuse(504, late, "{ nbsrv eq 0 } { var(txn.held) -m str late }")}\
{END_OF_REFUSALS}\
  # First pass, or second pass in a worker that a reload replaced: go to the frontend {INSIDE_FRONTEND}.
  http-request set-header x-cortex-backend %[be_name] if {{ nbsrv eq 0 }}
  http-request set-header x-cortex-held 1 if {{ nbsrv eq 0 }}
"""


def _has_room(backend: ApiBackend) -> str:
    """Return the condition that the queue is far from its limit."""
    return f"{{ queue lt {backend.max_queue} }}" if backend.max_queue > 0 else "{ be_conn_free gt 0 }"


def _queue_limit(backend: ApiBackend) -> str:
    limit = max(0, backend.max_queue)
    full = _error(backend, 503, "the queue is full")
    # Held requests enter the queue all at once, whatever its limit.
    new = "! { nbsrv eq 0 } ! { var(txn.held) -m found }"
    if limit == 0:
        return refuse(503, full, f"{{ be_conn_free le 0 }} {new}")
    # The limit is per ready replica process.
    return f"""\
  http-request set-var(txn.limit) nbsrv,mul({limit}) if {{ queue ge {limit} }}
{refuse(503, full, f"{{ queue ge {limit} }} {{ queue,sub(txn.limit) ge 0 }} {new}")}"""
