"""Translation of the paths in a replica's spec between the operator's home and a node's home. Pure.

A field of `ReplicaSpec` (or of a dataclass inside it) that holds a path is declared with `field(metadata=HOME_PATH)`;
only these are translated. `tests/cluster/test_path_mapping.py` fails for a text field that is not classified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import PurePosixPath
from typing import Any, TypeVar

from cortex.home import Home
from cortex.models.spec import HOME_PATH

T = TypeVar("T")

_FOLDERS = (
    "projects_dir",
    "environments_dir",
    "models_dir",
    "logs_dir",
    "replicas_dir",
    "sockets_dir",
    "metrics_dir",
    "recordings_dir",
)


def home_folders(source: Home, target: Home) -> dict[str, str]:
    """Return the folders of `source` mapped to those of `target`, for `map_paths`."""
    return {str(getattr(source, name)): str(getattr(target, name)) for name in _FOLDERS}


def map_paths(spec: T, folders: Mapping[str, str]) -> T:
    """Return a copy of a dataclass in which each path below a key of `folders` is below its value; others stay."""
    changed: dict[str, Any] = {}
    for each in fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, each.name)
        changed[each.name] = _map_value(value, folders, is_path=HOME_PATH.items() <= each.metadata.items())
    return replace(spec, **changed)  # type: ignore[type-var]


def _map_value(value: Any, folders: Mapping[str, str], is_path: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_map_value(each, folders, is_path) for each in value)
    if is_dataclass(value):
        return map_paths(value, folders)
    return _map_path(value, folders) if is_path and value else value


def _map_path(path: str, folders: Mapping[str, str]) -> str:
    for source, target in folders.items():
        if path == source or path.startswith(f"{source}/"):
            return str(PurePosixPath(target) / path[len(source) :].lstrip("/"))
    return path
