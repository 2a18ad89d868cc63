"""Signatures of the APIs' revisions, as JSON: known once a process of the revision was ready. Table `signatures`."""

from __future__ import annotations

from sqlalchemy import Engine, delete, select, union

from cortex.state.database import reading
from cortex.state.postgresql import DEADLINE
from cortex.state.queries.apis import WRITE_S
from cortex.state.tables import api_history, apis, insert_for, serving_revisions, signatures


class SignatureStore:
    """Signatures by API and revision."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(**{DEADLINE: WRITE_S})
        self._reading = reading(self._engine)

    def get(self, api: str, revision: str) -> str | None:
        """Return the signature of a revision; None if it is not known."""
        query = select(signatures.c.signature).where(signatures.c.api == api, signatures.c.revision == revision)
        with self._reading.connect() as connection:
            return connection.execute(query).scalar_one_or_none()

    def put(self, api: str, revision: str, signature: str) -> None:
        """Store the signature of a revision, and delete those of revisions that can't be deployed again.

        Ignored if the API was deleted, or if the revision is one of those.
        """
        with self._engine.begin() as connection:
            known = union(
                select(apis.c.revision).where(apis.c.name == api),
                select(api_history.c.revision).where(api_history.c.api == api),
                select(serving_revisions.c.revision).where(serving_revisions.c.api == api),
            )
            revisions = set(connection.execute(known).scalars())
            unused = delete(signatures).where(signatures.c.api == api, signatures.c.revision.not_in(revisions))
            connection.execute(unused)
            if revision in revisions:
                row = insert_for(connection, signatures).values(api=api, revision=revision, signature=signature)
                keys = [signatures.c.api, signatures.c.revision]
                connection.execute(row.on_conflict_do_update(index_elements=keys, set_={"signature": signature}))
