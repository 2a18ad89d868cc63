"""Connections to SQLite files; knows nothing of what is stored in them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.pool import ConnectionPoolEntry

from cortex.state.fencing import READ_ONLY

#: How long a statement waits for another process's write before it fails.
BUSY_TIMEOUT_MS = 10_000

#: Of every connection. A write that was acknowledged survives a power cut.
PRAGMAS = (f"busy_timeout = {BUSY_TIMEOUT_MS}", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON")

#: Space of deleted payloads goes back to the disk; has effect only before anything is written.
JOB_PRAGMAS = ("auto_vacuum = INCREMENTAL", *PRAGMAS, f"journal_size_limit = {64 * 2**20}", "cache_size = -16384")


def sqlite_engine(path: Path, pragmas: Sequence[str]) -> Engine:
    """Return connections to the file at `path`, which is made, readable by its owner only."""
    with contextlib.suppress(OSError):  # SQLite says it better
        path.touch(mode=0o600)  # the files that SQLite puts beside it get its mode
    engine = create_engine(URL.create("sqlite", database=str(path)))
    event.listen(engine, "connect", partial(_configure, pragmas))
    event.listen(engine, "begin", _begin)
    return engine


def _configure(pragmas: Sequence[str], connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    # The driver's own implicit BEGIN leaves DDL outside the transaction; `_begin` sends ours.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in pragmas:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection, *_: Any) -> None:
    # A transaction that reads first fails at its write if another wrote meanwhile; one that takes the lock waits.
    is_reading = connection.get_execution_options().get(READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")
