"""Owns the rules by which HAProxy shares a splitter's requests out, and has copies made; does no I/O."""

from __future__ import annotations

from cortex.gateway import keys
from cortex.gateway.backends import TIMEOUT_MARGIN_MS, Sockets, milliseconds
from cortex.gateway.maps import SHADOWS_MAP, SLOTS_MAP, SPLITS_MAP
from cortex.gateway.routes import RoutingTable


def split_rules(table: RoutingTable, sockets: Sockets, body_timeout_s: float) -> str:
    """Write the rules of the frontend that choose an API for each request to a splitter.

    The shares are in maps of a hundred slots per splitter, so that they change without a reload.
    """
    if not table.splits:
        return ""
    copied = "if { var(txn.copy) -m beg api: } ! { req.hdr(x-cortex-info) -m found } ! { stopping }"
    longest_ms = max((milliseconds(backend.timeout_s) for backend in table.backends), default=1000)
    copy_timeout_s = -(-(longest_ms + TIMEOUT_MARGIN_MS) // 1000)
    return f"""\
  http-request set-var(txn.split) path,map({SPLITS_MAP})
  http-request set-var-fmt(txn.slot) %[var(txn.split)]:%[rand(100)] if {{ var(txn.split) -m found }}
  http-request set-var-fmt(txn.copied) %[var(txn.split)]:%[rand(100)] if {{ var(txn.split) -m found }}
{keys.split_rules(keys.keyed_splits(table))}\
  http-request set-var(txn.copy) var(txn.copied),map({SHADOWS_MAP}) if {{ var(txn.split) -m found }}
  http-request wait-for-body time {milliseconds(body_timeout_s)}ms {copied}
  http-request lua.cortex_copy '{sockets.inside}' {copy_timeout_s} {copied}
"""


def split_routes(table: RoutingTable) -> str:
    """Write how such a request finds its backend."""
    if not table.splits:
        return ""
    return f"  use_backend %[var(txn.slot),map({SLOTS_MAP})] if {{ var(txn.split) -m found }}\n"
