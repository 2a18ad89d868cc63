"""Small facts about the installation, most of them settled once: the only reader and writer of these rows."""

from __future__ import annotations

from sqlalchemy import Engine, select

from cortex.state.database import reading
from cortex.state.tables import facts, insert_for


class KeyValueStore:
    """Any thread may call it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = reading(engine)

    def get(self, name: str) -> str | None:
        """Return a fact, or None."""
        with self._reading.connect() as connection:
            return connection.execute(select(facts.c.value).where(facts.c.name == name)).scalar_one_or_none()

    def put(self, name: str, value: str) -> None:
        """Change a fact, or settle it: for what one operator at a time keeps."""
        with self._engine.begin() as connection:
            row = insert_for(connection, facts).values(name=name, value=value)
            connection.execute(row.on_conflict_do_update(index_elements=[facts.c.name], set_={"value": value}))

    def put_if_absent(self, name: str, value: str) -> str:
        """Settle a fact, unless that was done; return what holds from now on, of all that try at once the same."""
        with self._engine.begin() as connection:
            connection.execute(insert_for(connection, facts).values(name=name, value=value).on_conflict_do_nothing())
            holds: str = connection.execute(select(facts.c.value).where(facts.c.name == name)).scalar_one()
            return holds
