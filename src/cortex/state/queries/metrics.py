"""Totals of the metrics of replicas that ended, by API and series."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sqlalchemy import Engine, bindparam, delete, insert, select, update

from cortex.state.database import reading
from cortex.state.postgresql import DEADLINE
from cortex.state.queries.apis import revision_prefixes
from cortex.state.tables import folded_replicas, metric_totals

Numbers = Mapping[str, float]

#: Deadline of a transaction; the operator's event loop waits for some of them.
DEADLINE_S = 6.0


class MetricStore:
    """Metric totals by API. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(**{DEADLINE: DEADLINE_S})
        self._reading = reading(self._engine)

    def totals(self, api: str) -> dict[str, float]:
        """Return an API's totals, sorted by key."""
        query = select(metric_totals.c.key, metric_totals.c.value).where(metric_totals.c.api == api)
        with self._reading.connect() as connection:
            return {row.key: row.value for row in connection.execute(query.order_by(metric_totals.c.key))}

    def folded(self) -> frozenset[str]:
        """Return the replicas whose metrics are part of the totals."""
        with self._reading.connect() as connection:
            return frozenset(connection.execute(select(folded_replicas.c.replica)).scalars())

    def revision_prefixes(self, api: str) -> frozenset[str]:
        """Return the prefixes of an API's revisions; see `apis.revision_prefixes`."""
        with self._reading.connect() as connection:
            return revision_prefixes(connection, api)

    def fold(
        self,
        api: str,
        revision_prefix: str,
        replica: str,
        numbers: Numbers,
        combine: Callable[[Numbers, Numbers], Numbers],
        gone: Collection[str] = (),
    ) -> None:
        """Set the API's totals to `combine(totals, numbers)`, once per replica; ignored if the API was deleted.

        Also ignored if the revision belongs to a deleted API of the same name. `gone` replicas have no files left, so
        their metrics cannot be added again, and the record that they were added is deleted.
        """
        of_api = metric_totals.c.api == api
        with self._engine.begin() as connection:
            connection.execute(delete(folded_replicas).where(folded_replicas.c.replica.in_(gone)))
            if connection.execute(select(folded_replicas).where(folded_replicas.c.replica == replica)).first():
                return
            connection.execute(insert(folded_replicas).values(replica=replica))
            if revision_prefix not in revision_prefixes(connection, api):
                return
            query = select(metric_totals.c.key, metric_totals.c.value).where(of_api).order_by(metric_totals.c.key)
            before = {row.key: row.value for row in connection.execute(query)}
            after = combine(before, numbers)
            made = [{"api": api, "key": key, "value": value} for key, value in after.items() if key not in before]
            changed = [
                {"of_key": key, "value": value} for key, value in after.items() if before.get(key, value) != value
            ]
            if made:
                connection.execute(insert(metric_totals), made)
            if changed:
                connection.execute(
                    update(metric_totals).where(of_api, metric_totals.c.key == bindparam("of_key")), changed
                )
