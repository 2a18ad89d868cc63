"""CORS: the rules by which HAProxy permits pages of other origins to read responses (https://fetch.spec.whatwg.org).

Applications answer preflight requests, and set the headers of their responses, unless their API has rules or requires a
key: browsers send no key with preflight requests, and requests without one must not reach the code of the user.

Every origin may read the responses of an API without rules of its own, also errors of the gateway. While no API has
rules, no map is looked up. Otherwise the frontend looks up the API of each path, and its rules in `cors.map`, which
commands change:

| key | value |
|---|---|
| backend or splitter | request headers that pages may send: `content-type, x-tenant`, or `*` |
| backend or splitter, `/`, origin | `credentials` if cookies may be sent, else `anonymous` |

Documentation has the rules of its API. A splitter without rules has those of the first of its APIs that has any:
otherwise it would bypass them.
"""

from __future__ import annotations

from cortex.gateway.maps import (
    CORS_MAP,
    DOCS_MAP,
    JOBS_MAP,
    PREFLIGHTS_MAP,
    ROUTES_MAP,
    SPLITS_MAP,
    answer_preflights,
    cors_by_key,
)
from cortex.gateway.routes import RoutingTable

_METHODS = "hdr access-control-allow-methods 'GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS'"
_MAX_AGE = "hdr access-control-max-age 86400"
_OF_APPLICATION = "{ var(txn.preflights) -m found }"
_PREFLIGHT = f"{{ method OPTIONS }} ! {{ stopping }} ! {_OF_APPLICATION}"
_ANY_HEADER = "{ var(txn.cors_headers) -m str * }"
_ALLOWED = "{ var(txn.cors_origin) -m found }"
_RESTRICTED = "{ var(txn.cors_headers) -m found }"
#: Responses of applications that decide themselves, without those that the gateway generates.
_KEPT = "{ var(txn.cors_kept) -m found }"
_KEEP = f"  http-after-response set-var(txn.cors_kept) res.hdr(server-timing) if {_OF_APPLICATION}\n"


def request_rules(table: RoutingTable) -> str:
    """Return the frontend's rules that find the permissions of a request, and answer preflight requests."""
    if not cors_by_key(table):
        headers = "hdr access-control-allow-headers '*, Authorization'"
        answer = f"  http-request return status 204 {_METHODS} {headers} {_MAX_AGE} if {_PREFLIGHT}\n"
        return _application_rules(table) + answer
    of_jobs = f"path,regsub('[^/]+$',''),map({JOBS_MAP})"
    allowed = f"var(txn.cors),concat(/,txn.cors_asked),map({CORS_MAP})"
    return f"""\
{_application_rules(table)}\
  http-request set-var(txn.cors) path,map({ROUTES_MAP})
  http-request set-var(txn.cors) path,map({SPLITS_MAP})
  http-request set-var(txn.cors) path,map({DOCS_MAP})
  http-request set-var(txn.cors) {of_jobs} unless {{ var(txn.cors) -m found }}
  http-request set-var(txn.cors) var(txn.prefix),field(1,|) if {{ var(txn.prefix) -m found }}
  http-request set-var(txn.cors_headers) var(txn.cors),map({CORS_MAP})
  http-request set-var(txn.cors_asked) req.fhdr(origin)
  http-request set-var(txn.cors_origin) str(*) unless {_RESTRICTED}
  http-request set-var(txn.cors_origin) str(*) if {{ var(txn.cors),concat(/*),map({CORS_MAP}) -m found }}
  http-request set-var(txn.cors_mode) {allowed}
  http-request set-var(txn.cors_origin) var(txn.cors_asked) if {{ var(txn.cors_mode) -m found }}
  # With credentials, browsers do not accept `*` as a list of headers: return those of the question.
  http-request set-var-fmt(txn.cors_headers) '*, Authorization' unless {_RESTRICTED}
  http-request set-var(txn.cors_headers) req.fhdr(access-control-request-headers) if {_ANY_HEADER}
  http-request return status 204 {_METHODS} hdr access-control-allow-headers '%[var(txn.cors_headers)]' {_MAX_AGE} \
if {_PREFLIGHT} {_ALLOWED}
  http-request return status 204 if {_PREFLIGHT}
"""


def _application_rules(table: RoutingTable) -> str:
    """Return the rules that recognize requests whose application decides about CORS; none without such applications."""
    if not answer_preflights(table):
        return ""
    splits = (f"path,map({SPLITS_MAP})",) if table.splits else ()
    return "".join(
        f"  http-request set-var(txn.preflights) {found},map({PREFLIGHTS_MAP})\n"
        for found in (f"path,map({ROUTES_MAP})", *splits, "var(txn.prefix),field(1,|)")
    )


def response_rules(table: RoutingTable) -> str:
    """Return the frontend's rules for the headers of all responses, also of those that the gateway generates."""
    if not cors_by_key(table):
        any_origin = "http-after-response set-header access-control-allow-origin *"
        return f"{_KEEP}  {any_origin} unless {_KEPT}\n" if answer_preflights(table) else f"  {any_origin}\n"
    keep, own = (_KEEP, f"! {_KEPT}") if answer_preflights(table) else ("", "")
    any_origin = "{ var(txn.cors_origin) -m str * }"
    with_credentials = "{ var(txn.cors_mode) -m str credentials }"
    return f"""\
{keep}\
  http-after-response del-header access-control- -m beg if ! {_ALLOWED} {own}
  http-after-response set-header access-control-allow-origin %[var(txn.cors_origin)] if {_ALLOWED} {own}
  http-after-response set-header access-control-allow-credentials true if {with_credentials} {own}
  http-after-response add-header vary Origin if ! {any_origin} {own}
"""
