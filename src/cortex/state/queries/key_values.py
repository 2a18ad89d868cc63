"""Key-value settings of the installation (its secret, for example); most are set once. Table `facts`."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Engine, delete, select

from cortex.state.database import reading
from cortex.state.tables import facts, insert_for


class KeyValueStore:
    """Key-value settings. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = reading(engine)

    def get(self, name: str) -> str | None:
        """Return a value, or None."""
        with self._reading.connect() as connection:
            return connection.execute(select(facts.c.value).where(facts.c.name == name)).scalar_one_or_none()

    def put(self, name: str, value: str) -> None:
        """Set a value that only one operator at a time changes."""
        with self._engine.begin() as connection:
            row = insert_for(connection, facts).values(name=name, value=value)
            connection.execute(row.on_conflict_do_update(index_elements=[facts.c.name], set_={"value": value}))

    def delete_others(self, prefix: str, names: Collection[str]) -> None:
        """Delete all values whose names begin with `prefix`, except `names`."""
        with self._engine.begin() as connection:
            others = facts.c.name.startswith(prefix, autoescape=True) & facts.c.name.not_in(list(names))
            connection.execute(delete(facts).where(others))

    def put_if_absent(self, name: str, value: str) -> str:
        """Set a value unless it is set; return the stored value, which is the same for all concurrent callers."""
        with self._engine.begin() as connection:
            connection.execute(insert_for(connection, facts).values(name=name, value=value).on_conflict_do_nothing())
            stored: str = connection.execute(select(facts.c.value).where(facts.c.name == name)).scalar_one()
            return stored
