"""Contents of HAProxy's map files, as pure functions of the routing table.

Text of users (endpoints, the reason why an API is unavailable) goes only into map files, never into the
configuration, so that HAProxy never parses it as a directive.

| map | key | value | changed by |
|---|---|---|---|
| `routes.map` | path | backend | reload |
| `docs.map` | path of documentation | backend or splitter that it describes | reload |
| `info.map` | path that ends in `/info` | backend or splitter | reload |
| `jobs.map` | endpoint and `/` | backend of the API that runs jobs | reload |
| `splits.map` | path | splitter | reload |
| `openai.map` | beginning of a path whose errors have OpenAI's form, such as `/llm/v1/` | 1 | reload |
| `prefixes.map` | beginning of a path, such as `/iris/v2/` | backend or splitter, a vertical bar, endpoint | reload |
| `preflights.map` | backend or splitter whose applications answer preflight requests | 1 | reload |
| `grpc.map` | gRPC API, or gRPC service | backend, for metadata, health checks and reflection | reload |
| `unavailable.map` | backend | reason, as the inside of a JSON string | command |
| `holds.map` | backend | 1 if requests wait for the first replica | command |
| `ready.map` | API or splitter; path that asks whether it is ready; `*` | see `_ready_map` | command |
| `slots.map` | splitter:0 to splitter:99 | backend | command |
| `canaries.map` | backend of an API, and 0 to 99 | it, or the backend of its canary | command |
| `shadows.map` | splitter, or backend with a canary, and :0 to :99 | backend that gets a copy, or `-` | command |
| `cors.map` | backend or splitter; followed by `/` and an origin | see `cors` | command |
| `keys.map` | hash of a key; hash/API | id of the key | command |
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields

from cortex.gateway.protocols import OPENAI_MAP, RULES, SET_OPENAI, Protocol
from cortex.gateway.routes import ApiBackend, Cors, RoutingTable, Share, Split, required_apis
from cortex.payloads.openai_errors import OPENAI_PATH

ROUTES_MAP = "routes.map"
DOCS_MAP = "docs.map"
INFO_MAP = "info.map"
JOBS_MAP = "jobs.map"
SPLITS_MAP = "splits.map"
PREFIXES_MAP = "prefixes.map"
PREFLIGHTS_MAP = "preflights.map"
UNAVAILABLE_MAP = "unavailable.map"
HOLDS_MAP = "holds.map"
READY_MAP = "ready.map"
SLOTS_MAP = "slots.map"
SHADOWS_MAP = "shadows.map"
CANARIES_MAP = "canaries.map"
CORS_MAP = "cors.map"
KEYS_MAP = "keys.map"
GRPC_MAP = "grpc.map"

BACKEND_PREFIX = "api:"
#: No name of an API has a dot.
CANARY_SUFFIX = ".canary"
#: Backends of APIs that run jobs. Their only server is always the operator, so no command ever changes them.
JOBS_PREFIX = "jobs:"
#: The backend of documentation, whose only server is the operator.
DOCS_BACKEND = "cortex-docs"
UNKNOWN_BACKEND = "cortex-unknown"
HEALTH_BACKEND = "cortex-health"
#: A flag, changed by command: the only server of this backend is up while the gateway drains. No request goes there.
DRAINING_BACKEND = "cortex-draining"
DRAINING_SERVER = f"{DRAINING_BACKEND}/draining"
#: The only server of this backend is the operator, whose health checks tell whether it runs. No request goes there.
OPERATOR_BACKEND = "cortex-operator"
#: The backend of the Open Inference Protocol's paths at the root that name no API.
V2_BACKEND = "cortex-v2"
NO_SHADOW = "-"
V2_PATH = "/v2"

UNAVAILABLE_MAX_LENGTH = 1000
_HEALTH_PATHS = ("/livez", "/readyz", "/healthz")
_READY_PATH, _V2_READY_PATH, _V2_LIVE_PATH = "/readyz", "/v2/health/ready", "/v2/health/live"
#: Values of the map of readiness, besides names of backends: always, and never.
_READY, _NOT_READY = "+", "-"
_V2_PATHS = ("/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/models", "/v2/models/")
#: Files that the page at `<endpoint>/docs` refers to, by name.
DOCS_ASSETS = ("docs.css", "docs.js", "swagger-ui-bundle.js", "swagger-ui.css")
_DOCS_SUFFIXES = ("/openapi.json", "/docs", "/docs/", *(f"/docs/{name}" for name in DOCS_ASSETS))

Maps = dict[str, dict[str, str]]


class CanaryBackend(ApiBackend):
    """The newest revision of an API while it gets a part of its requests: a backend of its own in HAProxy."""


def with_canaries(table: RoutingTable) -> list[ApiBackend]:
    """Return all backends, each one followed by that of its canary."""
    found: list[ApiBackend] = []
    for backend in table.backends:
        found.append(backend)
        if backend.canary is not None:
            values = {each.name: getattr(backend, each.name) for each in fields(backend)}
            found.append(CanaryBackend(**{**values, "servers": backend.canary.servers, "canary": None, "holds": False}))
    return found


def backend_name(backend: ApiBackend) -> str:
    """Return the name of an API's backend in HAProxy."""
    if isinstance(backend, CanaryBackend):
        return f"{BACKEND_PREFIX}{backend.api}{CANARY_SUFFIX}"
    return (JOBS_PREFIX if backend.jobs_socket else BACKEND_PREFIX) + backend.api


def api_of(backend: str) -> str | None:
    """Return the API of a backend's name, or None for one of the gateway's own backends."""
    for prefix in (BACKEND_PREFIX, JOBS_PREFIX):
        if backend.startswith(prefix):
            return backend.removeprefix(prefix).removesuffix(CANARY_SUFFIX)
    return None


def unavailable_text(backend: ApiBackend) -> str:
    r"""Return the reason as the inside of a JSON string: one line of printable ASCII, as map files require."""
    text = backend.unavailable.strip()[:UNAVAILABLE_MAX_LENGTH].strip() or "starting"
    return json.dumps(text)[1:-1].replace("\x7f", "\\u007f")


def map_text(entries: Mapping[str, str]) -> str:
    """Return the text of a map file."""
    return "".join(f"{key} {value}\n" for key, value in sorted(entries.items()))


def fixed_maps(table: RoutingTable) -> Maps:
    """Return the maps that only a reload changes. Paths match exactly.

    An API's own endpoint takes precedence over a path derived from another endpoint.
    """
    routes: dict[str, str] = {}
    info: dict[str, str] = {}
    splits: dict[str, str] = {}
    # A splitter may have the path of a gRPC service that its APIs share.
    entries: tuple[ApiBackend | Split, ...] = (*table.splits, *table.backends)
    for suffix in ("", "/", "/info"):
        for entry in entries:
            path = entry.endpoint.rstrip("/") + suffix or "/"
            runs_jobs = isinstance(entry, ApiBackend) and bool(entry.jobs_socket)
            if (
                path in routes
                or path in splits
                or (suffix == "/info" and (runs_jobs or _has_application(table, entry)))
            ):
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
    for path in _V2_PATHS if table.v2_at_root else ():
        if path not in splits:
            routes.setdefault(path, V2_BACKEND)
    for entry in entries:
        for path in _probe_paths(table, entry):
            if path not in splits:
                routes.setdefault(path, HEALTH_BACKEND)
    docs = _docs_map(table, {*routes, *splits})
    routes |= dict.fromkeys(docs, DOCS_BACKEND)
    jobs = {f"{b.endpoint.rstrip('/')}/": backend_name(b) for b in table.backends if b.jobs_socket}
    prefixes = _prefixes_map(table)
    return {
        ROUTES_MAP: routes,
        DOCS_MAP: docs,
        INFO_MAP: info,
        JOBS_MAP: jobs,
        SPLITS_MAP: splits,
        PREFIXES_MAP: prefixes,
        PREFLIGHTS_MAP: dict.fromkeys(answer_preflights(table), "1"),
        OPENAI_MAP: {
            f"{entry.endpoint.rstrip('/')}{OPENAI_PATH}/": "1"
            for entry in entries
            if any(RULES[protocol].variables == SET_OPENAI for protocol in _protocols(table, entry))
        },
        GRPC_MAP: _grpc_map(table),
    }


def grpc_backends(table: RoutingTable) -> list[ApiBackend]:
    """Return the APIs that serve gRPC."""
    return [backend for backend in table.backends if backend.protocol is Protocol.GRPC]


def grpc_service(backend: ApiBackend) -> str:
    """Return the name of the service of a gRPC API, with its package."""
    return backend.endpoint.strip("/")


def _grpc_map(table: RoutingTable) -> dict[str, str]:
    """Return the backends of gRPC APIs by the names of the APIs and of their services."""
    found: dict[str, str] = {}
    for backend in grpc_backends(table):
        found.setdefault(grpc_service(backend), backend_name(backend))
        found[backend.api] = backend_name(backend)
    return found


def v2_names(table: RoutingTable) -> list[str]:
    """Return the names of APIs and splitters that serve the Open Inference Protocol."""
    apis = [backend.api for backend in table.backends if V2_PATH in _subpaths(table, backend)]
    return sorted([*apis, *(split.name for split in table.splits if V2_PATH in _subpaths(table, split))])


def _probe_paths(table: RoutingTable, entry: ApiBackend | Split) -> list[str]:
    """Return the paths below an endpoint at which the gateway tells whether the API or splitter is ready, or alive.

    All paths below the endpoint of an application or a command are its own, and those at the root are the gateway's.
    """
    endpoint = entry.endpoint.rstrip("/")
    if not endpoint or _has_application(table, entry):
        return []
    suffixes = (_READY_PATH, *((_V2_READY_PATH, _V2_LIVE_PATH) if V2_PATH in _subpaths(table, entry) else ()))
    return [endpoint + suffix for suffix in suffixes]


def _ready_map(table: RoutingTable) -> dict[str, str]:
    """Return what must be up for each API and splitter to answer requests, by its name and by its paths for that.

    A value consists of names of backends, each of which needs a server, `+` for what can always answer, or `-` for what
    can't. The value of `*` are all names.
    """
    needs = {backend.api: _needs(backend) for backend in table.backends}
    for split in table.splits:
        apis = [needs.get(api, _NOT_READY) for api in required_apis(split.shares)]
        needs[split.name] = " ".join(apis) or _NOT_READY
    entries: dict[str, str] = {}
    owners: tuple[ApiBackend | Split, ...] = (*table.splits, *table.backends)
    for entry in owners:
        name = entry.name if isinstance(entry, Split) else entry.api
        for path in _probe_paths(table, entry):
            if not path.endswith(_V2_LIVE_PATH):
                entries.setdefault(path, needs[name])
    return {**entries, **needs, **({"*": " ".join(sorted(needs))} if needs else {})}


def _needs(backend: ApiBackend) -> str:
    """Return what must be up for an API to answer requests."""
    if backend.jobs_socket:
        return _NOT_READY if backend.unavailable else OPERATOR_BACKEND
    return _READY if backend.holds and not backend.unavailable else backend_name(backend)


def _subpaths(table: RoutingTable, entry: ApiBackend | Split) -> list[str]:
    if isinstance(entry, ApiBackend):
        return [] if entry.jobs_socket else list(entry.subpaths)
    apis = {share.api for share in entry.shares}
    return sorted({path for backend in table.backends if backend.api in apis for path in _subpaths(table, backend)})


def _has_application(table: RoutingTable, entry: ApiBackend | Split) -> bool:
    return not {Protocol.APPLICATION, Protocol.COMMAND}.isdisjoint(_protocols(table, entry))


def _protocols(table: RoutingTable, entry: ApiBackend | Split) -> set[Protocol]:
    if isinstance(entry, ApiBackend):
        return {entry.protocol}
    apis = {share.api for share in entry.shares}
    return {backend.protocol for backend in table.backends if backend.api in apis}


def _prefixes_map(table: RoutingTable) -> dict[str, str]:
    """Return the paths below which an API or splitter serves all; the longest match counts."""
    found: dict[str, str] = {}
    entries: tuple[ApiBackend | Split, ...] = (*table.splits, *table.backends)
    for entry in entries:
        name = entry.name if isinstance(entry, Split) else backend_name(entry)
        endpoint = entry.endpoint.rstrip("/")
        for subpath in _subpaths(table, entry):
            found.setdefault(f"{endpoint}{subpath.rstrip('/')}/", f"{name}|{endpoint or '/'}")
    names = v2_names(table) if table.v2_at_root else ()
    splits = {split.name for split in table.splits}
    return found | {
        f"{V2_PATH}/models/{name}/": f"{name if name in splits else BACKEND_PREFIX + name}|/" for name in names
    }


def _docs_map(table: RoutingTable, taken: Collection[str]) -> dict[str, str]:
    """Return the paths of documentation, without those that lead to an API."""
    if not table.has_docs:
        return {}
    found: dict[str, str] = {}
    entries: tuple[ApiBackend | Split, ...] = (*table.backends, *table.splits)
    for entry in entries:
        if entry.has_docs and not _has_application(table, entry):
            key = entry.name if isinstance(entry, Split) else backend_name(entry)
            paths = (entry.endpoint.rstrip("/") + suffix for suffix in _DOCS_SUFFIXES)
            found |= {path: key for path in paths if path not in taken and path not in found}
    return found


def live_maps(table: RoutingTable) -> Maps:
    """Return the maps that commands change. Except in `cors.map`, only values change; keys need a reload."""
    calls = [backend for backend in with_canaries(table) if not backend.jobs_socket]
    names = {backend.api: backend_name(backend) for backend in table.backends if not backend.jobs_socket}
    slots: dict[str, str] = {}
    shadows: dict[str, str] = {}
    for split in table.splits:
        slots.update(_slots(split.name, split.shares, names, UNKNOWN_BACKEND))
        shadows.update(_slots(split.name, (split.shadow,) if split.shadow else (), names, NO_SHADOW))
    return {
        UNAVAILABLE_MAP: {backend_name(backend): unavailable_text(backend) for backend in calls},
        HOLDS_MAP: {backend_name(backend): "1" if backend.holds else "0" for backend in calls},
        READY_MAP: _ready_map(table),
        SLOTS_MAP: slots,
        SHADOWS_MAP: shadows | _canary_copies(table),
        CANARIES_MAP: _canaries_map(table),
        CORS_MAP: _cors_map(table),
    }


def cors_by_key(table: RoutingTable) -> dict[str, Cors]:
    """Return the permissions of each API and splitter that has them, by backend or name of the splitter."""
    by_api = {backend.api: backend.cors for backend in table.backends}
    found = {backend_name(backend): backend.cors for backend in table.backends}
    for split in table.splits:
        of_apis = (by_api.get(share.api) for share in split.shares)
        found[split.name] = split.cors or next(filter(None, of_apis), None)
    return {key: cors for key, cors in found.items() if cors is not None}


def answer_preflights(table: RoutingTable) -> list[str]:
    """Return the backends and splitters whose applications answer preflight requests; see `cors`."""
    keyed = {backend.api for backend in table.backends if backend.needs_key}
    ruled = cors_by_key(table)
    apis = {
        backend.api: backend_name(backend)
        for backend in table.backends
        if RULES[backend.protocol].answers_preflights and backend.api not in keyed
    }
    names = [name for name in apis.values() if name not in ruled]
    for split in table.splits:
        needs_key = split.needs_key or (split.shadow is not None and split.shadow.api in keyed)
        if not needs_key and split.name not in ruled and all(share.api in apis for share in split.shares):
            names.append(split.name)
    return names


def _cors_map(table: RoutingTable) -> dict[str, str]:
    entries: dict[str, str] = {}
    for key, cors in cors_by_key(table).items():
        entries[key] = ", ".join(cors.headers)
        mode = "credentials" if cors.credentials else "anonymous"
        entries |= {f"{key}/{origin}": mode for origin in cors.origins}
    return entries


def _canaries_map(table: RoutingTable) -> dict[str, str]:
    entries: dict[str, str] = {}
    for backend in with_canaries(table):
        if backend.canary is not None:
            own = backend_name(backend)
            entries |= {
                f"{own}:{number}": own + CANARY_SUFFIX if number < backend.canary.percent else own
                for number in range(100)
            }
    return entries


def _canary_copies(table: RoutingTable) -> dict[str, str]:
    entries: dict[str, str] = {}
    for backend in table.backends:
        if backend.canary is not None:
            own = backend_name(backend)
            to = own + CANARY_SUFFIX if backend.canary.gets_copies and backend.canary.servers else NO_SHADOW
            entries |= {f"{own}:{number}": to for number in range(100)}
    return entries


def keys_map(table: RoutingTable) -> dict[str, str]:
    """Return the map of API keys, whose entries commands add and delete.

    Each key has an entry for its hash, and one for `<hash>/<API>` per API, or `<hash>/*` for all. Hashes are in upper
    case, as HAProxy computes them.
    """
    entries: dict[str, str] = {}
    for key in table.keys:
        digest = key.digest.upper()
        entries |= {digest: key.id} | {f"{digest}/{api}": key.id for api in key.apis or ("*",)}
    return entries


def _slots(split: str, shares: tuple[Share, ...], names: Mapping[str, str], rest: str) -> dict[str, str]:
    """Assign each API as many of a hundred slots as its percentage. Slots of APIs not in the table get `rest`."""
    values = [names.get(share.api, rest) for share in shares for _ in range(share.percent)]
    values += [rest] * (100 - len(values))
    return {f"{split}:{number}": value for number, value in enumerate(values[:100])}
