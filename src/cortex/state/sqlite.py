"""Engines for SQLite files: pragmas, permissions, and explicit transactions."""

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

#: Time that a statement waits for another process's write before it fails.
BUSY_TIMEOUT_MS = 10_000

#: Pragmas of every connection. An acknowledged write survives a power cut.
PRAGMAS = (f"busy_timeout = {BUSY_TIMEOUT_MS}", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON")

#: Pragmas that also return the space of deleted payloads to the disk; `auto_vacuum` must precede the first write.
JOB_PRAGMAS = ("auto_vacuum = INCREMENTAL", *PRAGMAS, f"journal_size_limit = {64 * 2**20}", "cache_size = -16384")


def sqlite_engine(path: Path, pragmas: Sequence[str]) -> Engine:
    """Return an engine for the file at `path`, which is created readable by its owner only."""
    with contextlib.suppress(OSError):  # SQLite raises a better error
        path.touch(mode=0o600)  # SQLite gives the files beside it the same mode
    engine = create_engine(URL.create("sqlite", database=str(path)))
    event.listen(engine, "connect", partial(_configure, pragmas))
    event.listen(engine, "begin", _begin)
    return engine


def _configure(pragmas: Sequence[str], connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    # The driver's implicit BEGIN leaves DDL outside the transaction; `_begin` sends an explicit one.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in pragmas:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection, *_: Any) -> None:
    # BEGIN IMMEDIATE waits for the write lock. A transaction that reads first would fail if another wrote meanwhile.
    is_reading = connection.get_execution_options().get(READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")
