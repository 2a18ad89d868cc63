"""The tables, in SQLAlchemy Core, and nothing that runs a statement. Migrations make them; see `database.py`."""

from __future__ import annotations

from sqlalchemy import Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()

#: One row: the number of the last migration that was applied.
schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

#: The desired state of each API.
apis = Table(
    "apis",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("deployment", String(255)),
    Column("spec", Text, nullable=False),  # Api as JSON
    Column("project_hash", String(64), nullable=False),
    Column("nonce", String(32), nullable=False),  # changed by `refresh` so that the revision changes
    Column("revision", String(64), nullable=False),
    Column("spec_id", String(64), nullable=False),
    Column("api_id", String(128), nullable=False),
    Column("created_at", Float, nullable=False),  # UNIX seconds
    Column("updated_at", Float, nullable=False),
    Column("failure_message", Text),
    Column("failure_traceback", Text),
)

#: The last revision of an API that became ready: what is kept running while a newer one can't start.
serving_revisions = Table(
    "serving_revisions",
    metadata,
    Column("api", String(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("revision", String(64), nullable=False),
    Column("spec", Text, nullable=False),
    Column("project_hash", String(64), nullable=False),
)

#: Every version of an API that was ever deployed; kept after a delete that keeps the cache.
api_versions = Table(
    "api_versions",
    metadata,
    Column("api_id", String(128), primary_key=True),
    Column("api", String(64), nullable=False),
    Column("deployed_at", Float, nullable=False),
    Index("api_versions_by_api", "api"),
)
