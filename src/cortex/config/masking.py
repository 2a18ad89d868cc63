"""Mask values that look like secrets in the user's own parts of a configuration: `env`, `config`, submissions.

Keys of `cortex.yaml` itself are no secrets, such as `networking.auth`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "********"
_CODE_SECTIONS = ("handler", "predictor", "definition")
#: Begin of the name of a field that the user has named.
_OWN_FIELD = re.compile(rf"(?:{'|'.join(_CODE_SECTIONS)})\.(env|config)\.|schedule\.submission\.")
_SECRET = re.compile(
    r"(?i)(pass(word|wd|phrase)?s?|secrets?|token|credentials?|private|authorization|cookies?|dsn)$"
    r"|(api|access|account|auth|encryption|private|signing|ssh|license|master|shared|storage)[-_. ]?keys?(_?id)?$"
    r"|^(auth|bearer|jwt|pwd)$"
)
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: Deeper values are masked as a whole.
_MAX_DEPTH = 50
#: Credentials in a URL, `scheme://user:password@host`.
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")


def mask_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return an API's spec, in the keys of any file generation, with its secrets and all values of `env` masked."""
    masked = dict(spec)
    for name in _CODE_SECTIONS:
        if isinstance(section := spec.get(name), Mapping):
            masked[name] = section = {**section}
            if isinstance(section.get("env"), Mapping):
                section["env"] = dict.fromkeys(section["env"], MASK)
            if "config" in section:
                section["config"] = mask_secrets(section["config"])
    schedule = spec.get("schedule")
    if isinstance(schedule, Mapping) and "submission" in schedule:
        masked["schedule"] = {**schedule, "submission": mask_secrets(schedule["submission"])}
    return masked


def mask_secrets(value: Any, depth: int = 0) -> Any:
    """Return JSON data with masked private keys, passwords in URLs, and values of keys such as `password`."""
    if depth > _MAX_DEPTH:
        return MASK
    if isinstance(value, Mapping):
        return {
            key: MASK if is_secret(str(key)) and _has_content(inner) else mask_secrets(inner, depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(inner, depth + 1) for inner in value]
    if isinstance(value, str):
        if _PRIVATE_KEY.search(value):
            return MASK
        return _URL_PASSWORD.sub(rf"\1:{MASK}", value)
    return value


def mask_change(line: str) -> str:
    """Return a line of an API's history, such as `handler.config.token: a → b`, without the values of a secret."""
    field, _, change = line.partition(": ")
    if is_secret_field(field) and change not in ("added", "changed", "removed"):
        return f"{field}: changed"
    return str(mask_secrets(line))


def is_secret_field(field: str) -> bool:
    """Return True for the name of a field, such as `handler.config.db.password`, whose value may be a secret."""
    own = _OWN_FIELD.match(field)
    return own is not None and (own[1] == "env" or any(map(is_secret, field[own.end() :].split("."))))


def is_secret(key: str) -> bool:
    """Return True if the last word of a key is that of a secret, such as `token`."""
    return _SECRET.search(_WORD_START.sub("_", key)) is not None


def _has_content(value: Any) -> bool:
    return not isinstance(value, bool) and value not in (None, "", {}, [])
