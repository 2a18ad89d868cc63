"""Parse the JSON of bodies without the garbage collector, which takes most of the time of large ones.

Measured with 44 MB of `[[1],[1],…]`: 3.8 s of processor time with the collector, 0.8 s without it. It looks for cycles
again and again while millions of lists are created, and parsed JSON has no cycles.
"""

from __future__ import annotations

import gc
from typing import Any

import orjson

_LARGE_BYTES = 256 * 1024


def parse_json(body: bytes | str) -> Any:
    """Parse JSON. Raises: orjson.JSONDecodeError."""
    # Of several threads here, only the one that disables the collector enables it again.
    if len(body) < _LARGE_BYTES or not gc.isenabled():
        return orjson.loads(body)
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        gc.enable()
