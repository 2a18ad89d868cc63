"""`HTTPException` of starlette, and FastAPI's subclass: user code raises it to choose the response itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.exceptions import HTTPException

_SHOWN_CHARS = 500


def as_http_exception(error: BaseException) -> HTTPException | None:
    """Return an exception if it is an `HTTPException`, else None; starlette is not imported for this."""
    exceptions = sys.modules.get("starlette.exceptions")
    return error if exceptions is not None and isinstance(error, exceptions.HTTPException) else None


def describe_http_exception(exception: HTTPException) -> str:
    """Return one line such as `404: no such model`."""
    lines = str(exception.detail).split()
    text = f"{int(exception.status_code)}: {' '.join(lines)}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
