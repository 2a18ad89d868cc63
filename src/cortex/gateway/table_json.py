"""The routing table as JSON, for gateways on other machines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from cortex.gateway.routes import ApiKey, Backend, RoutingTable, Server, Share, Split

Json = dict[str, Any]


def table_to_json(table: RoutingTable) -> Json:
    """Return what `table_from_json` takes. The gateway's secret is in it."""
    return asdict(table)


def table_from_json(data: Mapping[str, Any]) -> RoutingTable:
    """Return the table that `table_to_json` told of.

    What this version does not know is refused rather than left out: it may be what keeps callers from an API.
    Raises: KeyError, TypeError, ValueError, AttributeError for anything that is no table.
    """
    table = _read(data, backends=_each(_backend), splits=_each(_split), keys=_each(_key))
    return RoutingTable(**table)


def _backend(data: Mapping[str, Any]) -> Backend:
    return Backend(**_read(data, servers=_each(lambda server: Server(**server))))


def _split(data: Mapping[str, Any]) -> Split:
    return Split(**_read(data, shares=_each(_share), shadow=lambda share: None if share is None else _share(share)))


def _share(data: Mapping[str, Any]) -> Share:
    return Share(**data)


def _key(data: Mapping[str, Any]) -> ApiKey:
    return ApiKey(**_read(data, apis=tuple))


def _each(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda items: tuple(read(item) for item in items)


def _read(data: Mapping[str, Any], **parts: Callable[[Any], Any]) -> Json:
    return {name: parts[name](value) if name in parts else value for name, value in data.items()}
