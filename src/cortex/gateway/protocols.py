"""Rules of the gateway for each protocol of an API: buffering, WebSockets, forwarded headers, and the form of errors.

The table `RULES` has one row for each protocol. `backends` writes the sections of HAProxy's configuration by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cortex.payloads.openai_errors import openai_error_type

#: The map of paths whose errors have OpenAI's form.
OPENAI_MAP = "openai.map"


class Protocol(StrEnum):
    """The requests that the replicas of an API expect; a value of the routing table's JSON form."""

    CALLS = "calls"  #: one call of a method or model for each request, with a whole body
    ROUTES = "routes"  #: likewise, also for all paths below the endpoint
    APPLICATION = "application"  #: an ASGI or WSGI application
    COMMAND = "command"  #: a server of the user's own
    GRPC = "grpc"  #: calls of a gRPC service, which the gateway converts to HTTP/1.1
    JOBS = "jobs"  #: requests to the operator, which runs the jobs of the API


@dataclass(frozen=True, slots=True)
class ErrorContent:
    """The content of an error that the gateway generates. It may contain HAProxy's expressions."""

    refusal: str  #: what `cortex_refuse` expects after the status: a body in JSON, or the status and message of gRPC
    options: str  #: those of the rule `http-error`


#: Returns an error of the gateway from its status, message and kind. The message may contain HAProxy's expressions.
ErrorForm = Callable[[int, str, str], ErrorContent]


#: Messages of errors that only HAProxy itself detects.
DETECTED_ERRORS: Mapping[int, str] = {
    408: "the request was not received in time",
    500: "internal error of the gateway",
    502: "the replica closed the connection before it answered",
}


def _json_content(body: str) -> ErrorContent:
    return ErrorContent(body, f"content-type application/json lf-string '{body}'")


def json_error(message: str) -> ErrorContent:
    """Return an error in the form of replicas."""
    return _json_content(f'{{"error":"{message}","request_id":"%[unique-id]"}}')


#: Server to which a request goes that is refused before its body is complete: the gateway itself, which reads on after
#: the response, because a client that still sends would not see the response on a connection that is closed at once.
#: Each section that refuses requests has it; it never counts as a replica.
REFUSALS_SERVER = "cortex-refusals"
_REFUSED = "{ var(txn.refusal) -m found }"
#: The rules after those of `refuse`, of which the last one that applies counts: they answer the request, or end the
#: section, which then sends it to the server above.
END_OF_REFUSALS = f"""\
  http-request lua.cortex_refuse if {_REFUSED}
  http-request allow if {_REFUSED}
"""


def refuse(status: int, error: ErrorContent, condition: str) -> str:
    """Return the rule that refuses requests with an error; see `END_OF_REFUSALS`."""
    return f"  http-request set-var-fmt(txn.refusal) '{status} {error.refusal}' if {condition}\n"


def refusals_server(socket: str) -> str:
    """Return the rules and the server for refused requests, which end a section except for its other servers."""
    return f"""\
  option persist
  use-server {REFUSALS_SERVER} if {_REFUSED}
  server {REFUSALS_SERVER} 'unix@{socket}' disabled pool-max-conn 0
"""


#: Sets the variable that selects the form of `routes_error`.
SET_OPENAI = f"  http-request set-var(txn.openai) path,concat(/),map_beg_int({OPENAI_MAP},0)\n"


def routes_error(status: int, message: str) -> ErrorContent:
    """Return an error in OpenAI's form for paths in the map, in that of replicas for others."""
    kind = openai_error_type(status)
    begin, end = (
        '%[var(txn.openai),iif("{}","")]'.format(text.replace('"', r"\""))
        for text in ('{"message":', f',"type":"{kind}","param":null,"code":null}}')
    )
    return _json_content(f'{{"error":{begin}"{message}"{end},"request_id":"%[unique-id]"}}')


def operator_error(message: str, kind: str) -> ErrorContent:
    """Return an error in the operator's form."""
    body = f'{{"kind":"{kind}","message":"{message}","error":"{message}","request_id":"%[unique-id]"}}'
    return _json_content(body.replace("'", r"'\''"))


#: gRPC statuses by the HTTP status of an error: INTERNAL for 400, which the gateway sends for malformed HTTP only,
#: UNAUTHENTICATED, PERMISSION_DENIED, UNIMPLEMENTED, RESOURCE_EXHAUSTED, UNAVAILABLE, DEADLINE_EXCEEDED.
GRPC_STATUSES: Mapping[int, int] = {400: 13, 401: 16, 403: 7, 404: 12, 413: 8, 431: 8, 502: 14, 503: 14, 504: 4}


def grpc_error(status: int, message: str) -> ErrorContent:
    """Return an error in the form of gRPC, which `SET_GRPC` and `GRPC_RESPONSES` complete."""
    quoted = message.replace("'", r"'\''")
    code = GRPC_STATUSES[status]
    return ErrorContent(f"{code}:{quoted}", f"hdr grpc-status {code} hdr grpc-message '{quoted}'")


#: Sets the variable for the requests of clients that speak gRPC; others call it in JSON.
SET_GRPC = "  http-request set-var(txn.grpc) bool(true) if { req.hdr(content-type) -m beg application/grpc }\n"
#: The section of the table that counts calls that failed: HAProxy's own counters have them as 200.
GRPC_BACKEND = "cortex-grpc"
#: The section of the table that counts the readiness probes answered with 503, which are no errors of the API.
PROBES_BACKEND = "cortex-probes"
#: The section of the table of open requests with a key, by the id of the key and the number of the request.
KEYED_BACKEND = "cortex-keyed"
_GRPC = "{ var(txn.grpc) -m found }"
#: Not in the second pass of a held request, whose status the first pass has to see.
_GRPC_RESPONSE = f"{_GRPC} {{ res.hdr(content-type) -m beg application/grpc }} ! {{ var(txn.backend) -m found }}"
#: The last rules for responses to clients that speak gRPC: errors, which have been logged by their status, get 200, as
#: the protocol demands. They are those of `grpc_error`, and of replicas whose call failed before its first message.
GRPC_RESPONSES = f"""\
  http-after-response set-header content-type application/grpc if {_GRPC} {{ res.hdr(grpc-status) -m found }}
  http-after-response sc-inc-gpc(0,0) if {{ status 400:499 }} {_GRPC_RESPONSE}
  http-after-response sc-inc-gpc(1,0) if {{ status ge 500 }} {_GRPC_RESPONSE}
  http-after-response set-status 200 if {_GRPC_RESPONSE}
"""


@dataclass(frozen=True)
class ProtocolRules:
    """Treatment of the requests of a protocol by the gateway."""

    waits_for_body: bool  #: receive the whole body before a replica is occupied; else stream it
    accepts_websockets: bool
    forwards_client: bool  #: describe the client in `X-Forwarded-*`, instead of what the client sent there
    answers_preflights: bool  #: the API decides about CORS itself, unless it has rules for that or requires a key
    error: ErrorForm
    variables: str = ""  #: rules that set the variables of `error`


RULES: Mapping[Protocol, ProtocolRules] = {
    Protocol.CALLS: ProtocolRules(
        waits_for_body=True,
        accepts_websockets=False,
        forwards_client=False,
        answers_preflights=False,
        error=lambda status, message, kind: json_error(message),
    ),
    Protocol.ROUTES: ProtocolRules(
        waits_for_body=True,
        accepts_websockets=False,
        forwards_client=False,
        answers_preflights=False,
        error=lambda status, message, kind: routes_error(status, message),
        variables=SET_OPENAI,
    ),
    Protocol.APPLICATION: ProtocolRules(
        waits_for_body=False,
        accepts_websockets=True,
        forwards_client=True,
        answers_preflights=True,
        error=lambda status, message, kind: json_error(message),
    ),
    Protocol.COMMAND: ProtocolRules(
        waits_for_body=False,
        accepts_websockets=True,
        forwards_client=True,
        answers_preflights=True,
        error=lambda status, message, kind: routes_error(status, message),
        variables=SET_OPENAI,
    ),
    Protocol.GRPC: ProtocolRules(
        waits_for_body=False,
        accepts_websockets=False,
        answers_preflights=False,
        forwards_client=True,
        error=lambda status, message, kind: grpc_error(status, message),
        variables=SET_GRPC,
    ),
    Protocol.JOBS: ProtocolRules(
        waits_for_body=False,
        accepts_websockets=False,
        forwards_client=False,
        answers_preflights=False,
        error=lambda status, message, kind: operator_error(message, kind),
    ),
}
