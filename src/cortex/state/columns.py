"""Types of columns that mean the same in every database, and statements that are spelled differently in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Connection, Dialect, Integer, String, Table, Text, insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.types import TypeDecorator, TypeEngine

#: SQLite has one integer type that can be a table's own order; elsewhere 32 bits would be too few.
Key = BigInteger().with_variant(Integer, "sqlite")


class Words(TypeDecorator[str]):
    """Text, sorted by code point. SQLite takes any length and any character, and so must PostgreSQL.

    That has no character 0 in texts; what stands in its place is what decoders put for bytes that are no text.
    """

    impl = String
    cache_ok = True

    def __init__(self, length: int | None = None) -> None:
        super().__init__(length)
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the type of a dialect."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(Text(collation="C"))
        return dialect.type_descriptor(String(self.length) if self.length else Text())

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Return what is stored."""
        if value is not None and dialect.name == "postgresql" and "\0" in value:
            return value.replace("\0", "\ufffd")
        return value


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert many rows with the same columns, none of them text."""
    if connection.dialect.name != "postgresql":
        connection.execute(insert(table), rows)
    elif rows:  # as arrays, one for each column: one short statement, however many there are
        names = tuple(rows[0])
        connection.exec_driver_sql(
            _unnesting(table, names, connection.dialect), tuple([row[name] for row in rows] for name in names)
        )


@cache
def _unnesting(table: Table, names: tuple[str, ...], dialect: Dialect) -> str:
    arrays = ", ".join(f"%s::{table.c[name].type.compile(dialect)}[]" for name in names)
    columns = ", ".join(f'"{name}"' for name in names)
    return f"INSERT INTO {table.name} ({columns}) SELECT * FROM unnest({arrays})"


def insert_for(connection: Connection, table: Table) -> Any:
    """Return an INSERT that can say what is done where there is such a row; `on_conflict_…` are its methods."""
    return (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(table)
