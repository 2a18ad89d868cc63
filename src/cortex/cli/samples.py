"""Sample files that commands send to APIs: their bytes and content type."""

from __future__ import annotations

import sys
from pathlib import Path

from cortex.errors import InputError

_CONTENT_TYPES = {
    ".json": "application/json",
    ".txt": "text/plain",
    ".csv": "text/csv",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
}
_OTHER = "application/octet-stream"


def read_sample(path: str) -> tuple[bytes, str]:
    """Return a sample and its content type; `-` is JSON from standard input. Raises: InputError."""
    if path == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed")
        return sys.stdin.buffer.read(), _CONTENT_TYPES[".json"]
    try:
        return Path(path).read_bytes(), _CONTENT_TYPES.get(Path(path).suffix.lower(), _OTHER)
    except OSError as error:
        raise InputError(f"{path}: can't be read: {(error.strerror or str(error)).lower()}") from None
