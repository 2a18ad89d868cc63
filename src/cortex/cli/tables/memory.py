"""Table of the memory of replicas, printed by `cortex get API`."""

from __future__ import annotations

from cortex.cli.output import Json, Table
from cortex.errors import format_size


def memory_table(memory: list[Json]) -> Table:
    """Return a table with one row per replica: a page that its processes share counts once, and under `shared`."""
    headers = ["replica", "memory", "shared", "private"]
    columns = ("proportional_bytes", "shared_bytes", "private_bytes")
    return headers, [[each["replica"], *(format_size(each[column]) for column in columns)] for each in memory]
