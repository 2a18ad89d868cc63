"""Owns the access log: which requests HAProxy writes a line for, what is in it, and how large the file may become."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from cortex.gateway.routes import Backend, RoutingTable

#: HAProxy's standard output; in the folder of logs.
ACCESS_LOG_FILE = "access.log"
ACCESS_LOG_MAX_BYTES = 64 * 1024 * 1024
_LINE_MAX_BYTES = 8192

_TIME = (
    '%[unique-id,field(1,-),div(1000),utime("%Y-%m-%dT%H:%M:%S")]'
    ".%[unique-id,bytes(10,3)]Z"  # the id begins with 13 digits
)
_LINE = (
    '{"time":"' + _TIME + '","request_id":"%ID","api":"%[var(txn.api)]","method":"%HM","path":"%[var(txn.path)]",'
    '"status":%ST,"bytes":%B,"queue_ms":%Tw,"total_ms":%Ta,"client":"%ci","termination":"%ts"'
)
#: Of who called, the id of the key and nothing else; `-` where nobody was asked for one.
_KEY = ',"key":"%[var(txn.key_id)]"'


def frontend_log(table: RoutingTable) -> str:
    """Write the rules of the frontend; nothing where no API wants its requests logged, as each line costs time."""
    if not any(backend.access_log for backend in table.backends):
        return ""
    return f"""\
  log stdout len {_LINE_MAX_BYTES} format raw local0 notice
  log-format '{_LINE}{_KEY if table.asks_for_keys else ""}}}'
  http-request set-log-level silent
"""


def section_log(backend: Backend) -> str:
    """Write the rules of an API's section."""
    if not backend.access_log:
        return ""
    return f"""\
  http-request set-log-level notice
  http-request set-var(txn.api) str({backend.api})
  http-request set-var(txn.path) path,json(utf8ps)
"""


def trim(log: Path, max_bytes: int) -> None:
    """Keep a log that HAProxy writes bounded. It appends through its own file, so this one is emptied, not replaced."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > max_bytes:
            older = log.with_name(log.name + ".1")
            shutil.copyfile(log, older)
            with log.open("rb") as newest, older.open("ab") as file:
                newest.seek(file.tell())
                shutil.copyfileobj(newest, file)  # what was written while the first copy was made
                os.truncate(log, 0)
