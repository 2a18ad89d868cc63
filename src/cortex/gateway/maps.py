"""Owns the contents of HAProxy's map files, as pure functions of the routing table; does no I/O.

Text of users (why an API is unavailable, endpoints) goes into map files only, never into the configuration, so
that nothing they write is ever read as a directive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cortex.gateway.routes import Backend, RoutingTable, Share, Split

ROUTES_MAP = "routes.map"
INFO_MAP = "info.map"
JOBS_MAP = "jobs.map"
SPLITS_MAP = "splits.map"
UNAVAILABLE_MAP = "unavailable.map"
HOLDS_MAP = "holds.map"
SLOTS_MAP = "slots.map"
SHADOWS_MAP = "shadows.map"
KEYS_MAP = "keys.map"

BACKEND_PREFIX = "api:"
#: Of APIs of jobs: their only server is the operator, always, so nothing in them is changed while HAProxy runs.
JOBS_PREFIX = "jobs:"
UNKNOWN_BACKEND = "cortex-unknown"
HEALTH_BACKEND = "cortex-health"
NO_SHADOW = "-"

UNAVAILABLE_MAX_LENGTH = 1000
_HEALTH_PATHS = ("/livez", "/readyz", "/healthz")

Maps = dict[str, dict[str, str]]


def backend_name(backend: Backend) -> str:
    """Name an API's backend in HAProxy."""
    return (JOBS_PREFIX if backend.jobs_socket else BACKEND_PREFIX) + backend.api


def api_of(backend: str) -> str | None:
    """Return the API of a backend's name, or None for one of the gateway's own."""
    for prefix in (BACKEND_PREFIX, JOBS_PREFIX):
        if backend.startswith(prefix):
            return backend.removeprefix(prefix)
    return None


def unavailable_text(backend: Backend) -> str:
    r"""Write the reason as the inside of a JSON string: printable ASCII on one line, as map files need it."""
    text = backend.unavailable.strip()[:UNAVAILABLE_MAX_LENGTH].strip() or "no reason is known"
    return json.dumps(text)[1:-1].replace("\x7f", "\\u007f")


def map_text(entries: Mapping[str, str]) -> str:
    """Write a map file."""
    return "".join(f"{key} {value}\n" for key, value in sorted(entries.items()))


def fixed_maps(table: RoutingTable) -> Maps:
    """Return the maps that only a reload changes: every path exactly.

    An endpoint of its own goes before what another endpoint implies. `info` holds the paths that ask for a summary of
    an API instead of calling it, `jobs` those below which jobs are.
    """
    routes: dict[str, str] = {}
    info: dict[str, str] = {}
    splits: dict[str, str] = {}
    entries: tuple[Backend | Split, ...] = (*table.backends, *table.splits)
    for suffix in ("", "/", "/info"):
        for entry in entries:
            path = entry.endpoint.rstrip("/") + suffix or "/"
            runs_jobs = isinstance(entry, Backend) and bool(entry.jobs_socket)
            if path in routes or path in splits or (suffix == "/info" and runs_jobs):
                continue
            if isinstance(entry, Split):
                splits[path] = entry.name
            else:
                routes[path] = backend_name(entry)
            if suffix == "/info":
                info[path] = entry.name if isinstance(entry, Split) else backend_name(entry)
    for path in _HEALTH_PATHS:
        if path not in splits:
            routes.setdefault(path, HEALTH_BACKEND)
    jobs = {f"{b.endpoint.rstrip('/')}/": backend_name(b) for b in table.backends if b.jobs_socket}
    return {ROUTES_MAP: routes, INFO_MAP: info, JOBS_MAP: jobs, SPLITS_MAP: splits}


def live_maps(table: RoutingTable) -> Maps:
    """Return the maps whose values are changed while HAProxy runs. Their keys follow from what a reload changes."""
    calls = [backend for backend in table.backends if not backend.jobs_socket]
    names = {backend.api: backend_name(backend) for backend in calls}
    slots: dict[str, str] = {}
    shadows: dict[str, str] = {}
    for split in table.splits:
        slots.update(_slots(split.name, split.shares, names, UNKNOWN_BACKEND))
        shadows.update(_slots(split.name, (split.shadow,) if split.shadow else (), names, NO_SHADOW))
    return {
        UNAVAILABLE_MAP: {backend_name(backend): unavailable_text(backend) for backend in calls},
        HOLDS_MAP: {backend_name(backend): "1" if backend.holds else "0" for backend in calls},
        SLOTS_MAP: slots,
        SHADOWS_MAP: shadows,
    }


def keys_map(table: RoutingTable) -> dict[str, str]:
    """Return the ids of keys: by the hash of the key alone, and by that and each API it is for, `*` for all.

    Entries come and go while HAProxy runs. Hashes are written as HAProxy writes them, in upper case.
    """
    entries: dict[str, str] = {}
    for key in table.keys:
        digest = key.digest.upper()
        entries |= {digest: key.id} | {f"{digest}/{api}": key.id for api in key.apis or ("*",)}
    return entries


def _slots(split: str, shares: tuple[Share, ...], names: Mapping[str, str], rest: str) -> dict[str, str]:
    """Give each API as many of a hundred slots as its percentage; one that is not in the table gets none."""
    values = [names.get(share.api, rest) for share in shares for _ in range(share.percent)]
    values += [rest] * (100 - len(values))
    return {f"{split}:{number}": value for number, value in enumerate(values[:100])}
