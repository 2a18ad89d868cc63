"""Owns the rules by which HAProxy asks callers for keys; does no I/O.

HAProxy decides by itself, by a map that is changed while it runs, so that keys hold while the operator is away. What it
looks up is the SHA-256 of what the caller sent, never that itself: how long a look-up takes tells of a hash that nobody
can steer, and the map, the log and HAProxy's memory have nothing that can be used as a key.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cortex.gateway.backends import error_of
from cortex.gateway.maps import KEYS_MAP
from cortex.gateway.routes import Backend, RoutingTable

_MISSING = "this API needs a key: send it as Authorization: Bearer KEY, or as X-API-Key: KEY"
_UNKNOWN = "this key is not known, or was revoked: ask for another, which cortex keys create makes"
_CHALLENGE = "hdr WWW-Authenticate Bearer"
#: What a section is entered from besides clients: the gateway itself, for a request that was checked already.
_FROM_CLIENT = "! { fe_name -m str cortex-inside }"


def keyed_splits(table: RoutingTable) -> tuple[str, ...]:
    """Return the splitters whose callers need a key: those that say so, and those before an API that does.

    Callers are asked at the endpoint they call, so an open splitter would be a way around the key of its APIs.
    """
    keyed = {backend.api for backend in table.backends if backend.needs_key}
    return tuple(
        split.name
        for split in table.splits
        if split.needs_key or any(share.api in keyed for share in (*split.shares, *filter(None, (split.shadow,))))
    )


def section_rules(backend: Backend, table: RoutingTable, keyed: Collection[str]) -> str:
    """Write what the section of an API begins with; nothing for one that all may call.

    `keyed`: what `keyed_splits` returns. Their callers are checked in the frontend, and refused here, where it counts.
    """
    leading = [
        split.name
        for split in table.splits
        if split.name in keyed and any(share.api == backend.api for share in split.shares)
    ]
    if backend.needs_key:
        asked = _FROM_CLIENT
        rules = _check(f"/{backend.api}", (_FROM_CLIENT, "! { var(txn.split) -m found }"))
    elif leading:
        asked = f"{{ var(txn.split) -m str {' '.join(leading)} }}"
        rules = ""
    else:
        return ""
    missing, unknown = error_of(backend, _MISSING, "unauthorized"), error_of(backend, _UNKNOWN, "unauthorized")
    other = error_of(backend, "this key is for other APIs", "forbidden")
    return f"""\
{rules}\
  http-request return status 401 {missing} {_CHALLENGE} if {asked} ! {{ var(txn.key) -m found }}
  http-request return status 401 {unknown} {_CHALLENGE} if {asked} ! {{ var(txn.key_id) -m found }}
  http-request return status 403 {other} if {asked} ! {{ var(txn.key_fits) -m found }}
  # A key is the gateway's business: user code, and what it logs, never has it.
  http-request del-header x-api-key if {asked}
  http-request del-header authorization if {asked}
"""


def split_rules(keyed: Sequence[str]) -> str:
    """Write what the frontend finds out about callers of splitters, before it has a copy made for a shadow."""
    if not keyed:
        return ""
    asked = f"{{ var(txn.split) -m str {' '.join(keyed)} }}"
    return f"""\
{_check("/,txn.split", (asked,))}\
  http-request unset-var(txn.copied) if {asked} ! {{ var(txn.key_fits) -m found }}
"""


def _check(concatenated: str, conditions: Sequence[str]) -> str:
    """Write the rules that leave the hash of what was sent in txn.key, the id of a known key in txn.key_id.

    txn.key_fits is there only if the key is for what was called.
    """
    when = " ".join(conditions)
    found = "{{ var(txn.key),concat({}),map(" + KEYS_MAP + ") -m found }}"
    return f"""\
  http-request set-var(txn.key) req.fhdr(x-api-key) if {when}
  http-request set-var(txn.key) http_auth_bearer if {when} ! {{ var(txn.key) -m found }}
  http-request set-var(txn.key) var(txn.key),sha2(256),hex if {when}
  http-request set-var(txn.key_id) var(txn.key),map({KEYS_MAP}) if {when}
  http-request set-var(txn.key_fits) bool(true) if {when} {found.format("/*")}
  http-request set-var(txn.key_fits) bool(true) if {when} {found.format(concatenated)}
"""
