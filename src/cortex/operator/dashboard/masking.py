"""Mask values that look like secrets before a page shows them: by the names of their keys. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "••••••••"
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


def mask_secrets(value: Any, depth: int = 0) -> Any:
    """Return JSON data in which the values of keys such as `password`, and passwords in URLs, are masked."""
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
        return _URL_PASSWORD.sub(rf"\1:{MASK}", value)
    return value


def mask_change(line: str) -> str:
    """Return a line of an API's history, such as `handler.config.token: a → b`, without the values of a secret."""
    key, separator, _ = line.partition(": ")
    if separator and is_secret(key.rpartition(".")[2]):
        return f"{key}: changed"
    return str(mask_secrets(line))


def is_secret(key: str) -> bool:
    """Return True for the name of a key whose value may be a secret: its last word says so."""
    return _SECRET.search(_WORD_START.sub("_", key)) is not None


def _has_content(value: Any) -> bool:
    return not isinstance(value, bool) and value not in (None, "", {}, [])
