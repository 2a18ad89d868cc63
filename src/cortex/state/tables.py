"""The tables, in SQLAlchemy Core, and nothing that runs a statement. Migrations make them; see `database.py`."""

from __future__ import annotations

from sqlalchemy import Column, Float, ForeignKey, Index, Integer, LargeBinary, MetaData, Table

from cortex.state.columns import Words

metadata = MetaData()

#: One row: the number of the last migration that was applied.
schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

#: The desired state of each API.
apis = Table(
    "apis",
    metadata,
    Column("name", Words(64), primary_key=True),
    Column("kind", Words(32), nullable=False),
    Column("deployment", Words(255)),
    Column("spec", Words, nullable=False),  # Api as JSON
    Column("project_hash", Words(64), nullable=False),
    Column("nonce", Words(32), nullable=False),  # changed by `refresh` so that the revision changes
    Column("revision", Words(64), nullable=False),
    Column("spec_id", Words(64), nullable=False),
    Column("api_id", Words(128), nullable=False),
    Column("created_at", Float, nullable=False),  # UNIX seconds
    Column("updated_at", Float, nullable=False),
    Column("failure_message", Words),
    Column("failure_traceback", Words),
    Column("replicas", Integer),  # how many are wanted; NULL until the autoscaler or a patch has said so
)

#: The last revision of an API that became ready: what is kept running while a newer one can't start.
serving_revisions = Table(
    "serving_revisions",
    metadata,
    Column("api", Words(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("revision", Words(64), nullable=False),
    Column("spec", Words, nullable=False),
    Column("project_hash", Words(64), nullable=False),
)

#: Every version of an API that was ever deployed; kept after a delete that keeps the cache.
api_versions = Table(
    "api_versions",
    metadata,
    Column("api_id", Words(128), primary_key=True),
    Column("api", Words(64), nullable=False),
    Column("deployed_at", Float, nullable=False),
    Index("api_versions_by_api", "api"),
)

#: Keys that callers of APIs show; of each only its hash.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Words(32), primary_key=True),
    Column("name", Words(255), nullable=False),
    Column("apis", Words, nullable=False),  # a list of names as JSON; empty: all
    Column("digest", Words(64), nullable=False),  # SHA-256, hexadecimal
    Column("created_at", Float, nullable=False),  # UNIX seconds
)

#: What replicas of an API counted that ended, one row per series.
metric_totals = Table(
    "metric_totals",
    metadata,
    Column("api", Words(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("key", Words, primary_key=True),  # replica.series.series_key
    Column("value", Float, nullable=False),
    sqlite_with_rowid=False,
)

#: Replicas whose numbers are in the totals though their files may still be there.
folded_replicas = Table("folded_replicas", metadata, Column("replica", Words(128), primary_key=True))

#: What is known of the drift of an API's predictions.
drifts = Table(
    "drifts",
    metadata,
    Column("api", Words(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("data", Words, nullable=False),  # control.drift.Drift as JSON
)

#: What was right, of predictions of which somebody has told.
truths = Table(
    "truths",
    metadata,
    Column("api", Words(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("request_id", Words(64), primary_key=True),
    Column("model_type", Words(16), nullable=False),
    Column("hour", Integer, nullable=False),  # of the prediction, in hours of UNIX time
    Column("prediction", Words(32), nullable=False),  # a number, or the hash of a class
    Column("error", Float, nullable=False),  # prediction less truth; of a class, 1 where it is wrong
    Index("truths_by_hour", "hour"),
    sqlite_with_rowid=False,
)

#: Sums of the truths by hour, changed with them.
truth_hours = Table(
    "truth_hours",
    metadata,
    Column("api", Words(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("model_type", Words(16), primary_key=True),
    Column("hour", Integer, primary_key=True),
    Column("told", Integer, nullable=False),  # how many
    Column("error", Float, nullable=False),
    Column("absolute", Float, nullable=False),
    Column("squared", Float, nullable=False),
    sqlite_with_rowid=False,
)

#: Small facts about the installation that are settled once, as its secret is.
facts = Table(
    "facts",
    metadata,
    Column("name", Words(64), primary_key=True),
    Column("value", Words, nullable=False),
)

#: Archives of projects in parts, where several operators share the database.
project_parts = Table(
    "project_parts",
    metadata,
    Column("hash", Words(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)
