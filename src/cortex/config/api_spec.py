"""The `api_spec` argument of user code: an API in the keys of its own file, with all defaults.

`complete` makes it when a file is read, because only then the user's own keys and values are known; it is stored with
the API (`Api.as_written`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from cortex.config.conversion import MODELS, Draft
from cortex.config.generations import HANDLER, IGNORED, NOT_YET, PREDICTOR, is_within_unsupported
from cortex.config.schema import Api

#: Sections that are only there if the user wrote them.
_OPTIONAL = (MODELS, "handler.server_side_batching", "networking.cors", "schedule", "tracker")


def api_spec(api: Api, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the `api_spec` of an API; `config` is that of a job, merged with the API's."""
    spec = _in_newest_keys(api) if api.as_written is None else copy.deepcopy(api.as_written)
    section = _code_section(spec)
    section["config"] = copy.deepcopy(dict(api.handler.config if config is None else config))
    section["env"] = dict(api.handler.env)
    return spec


def complete(draft: Draft, api: Api) -> dict[str, Any]:
    """Return what the user wrote, with the defaults of all keys that are missing or null.

    `config` and `env` are left out: the API has them, and they may be secret or large.
    """
    spec: dict[str, Any] = draft.item.plain()
    keys = {field: draft.written_key(field) for field in draft.available_fields()}
    keys |= {field: ".".join(map(str, node.path[1:])) for field, node in draft.fields.items()}
    _fill(spec, api, keys)
    for key in ("config", "env"):
        _code_section(spec).pop(key, None)
    return spec


def _code_section(spec: dict[str, Any]) -> dict[str, Any]:
    return next((spec[key] for key in ("handler", "predictor", "definition") if key in spec), {})


def _in_newest_keys(api: Api) -> dict[str, Any]:
    """Return the spec of an API that an older version stored, without what the user wrote."""
    generation = PREDICTOR if api.handler.interface == "predictor" else HANDLER
    keys = {field: key for field, key in generation.written.items() if not is_within_unsupported(api.kind, key)}
    spec: dict[str, Any] = {}
    for section in _OPTIONAL:
        if _value(api.model_dump(), section) is not None:
            _section(spec, next(key for field, key in keys.items() if field.startswith(f"{section}.")), create=True)
    _fill(spec, api, keys)
    return spec


def _fill(spec: dict[str, Any], api: Api, keys: Mapping[str, str]) -> None:
    """Set the value of each field whose key is missing or null; `keys` has the key of each field."""
    values = api.model_dump(mode="json")
    for field, key in keys.items():
        is_optional = field.startswith(tuple(f"{section}." for section in _OPTIONAL))
        section = _section(spec, key, create=not is_optional)
        leaf = key.rpartition(".")[2]
        if section is not None and field not in (IGNORED, NOT_YET) and section.get(leaf) is None:
            section[leaf] = _value(values, field)


def _section(spec: dict[str, Any], key: str, create: bool) -> dict[str, Any] | None:
    """Return the map that has a key; None if it is missing, or written as a single value or a list."""
    section: Any = spec
    for part in key.split(".")[:-1]:
        if part not in section and create:
            section[part] = {}
        section = section.get(part)
        if not isinstance(section, dict):
            return None
    return section  # type: ignore[no-any-return]


def _value(values: Any, field: str) -> Any:
    for part in field.split("."):
        values = None if values is None else values[part]
    return values
