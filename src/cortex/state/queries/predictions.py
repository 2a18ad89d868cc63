"""Stored state of tracked predictions: drift, and the ground truth that feedback reports later."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, Engine, delete, insert, select

from cortex.state.database import reading
from cortex.state.tables import apis, drifts, insert_for, truth_hours, truths

Item = TypeVar("Item")

#: Numeric errors are clipped to plus and minus this, so that the sum of their squares stays finite.
MAX_ERROR = 1e150
#: Maximum number of rows in one transaction, so that other writers do not wait long.
_CHUNK = 500


@dataclass(frozen=True)
class GroundTruth:
    """Ground truth of one prediction."""

    request_id: str
    hour: int  #: of the prediction, in hours of UNIX time
    prediction: str  #: a number, or the hash of a class
    error: float  #: prediction less truth; of a class, 1 where it is wrong


@dataclass(frozen=True)
class ErrorSums:
    """Sums of prediction errors."""

    told: int = 0  #: number of truths; named as the column
    error: float = 0.0
    absolute: float = 0.0
    squared: float = 0.0

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """Return the sums over both."""
        return ErrorSums(
            self.told + other.told,
            self.error + other.error,
            self.absolute + other.absolute,
            self.squared + other.squared,
        )


class PredictionStore:
    """Stored drift and ground truth. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = reading(engine)

    def drift(self, api: str) -> str | None:
        """Return the value stored by `set_drift`, or None."""
        with self._reading.connect() as connection:
            return connection.execute(select(drifts.c.data).where(drifts.c.api == api)).scalar_one_or_none()

    def set_drift(self, api: str, data: str) -> None:
        """Store the drift of an API; ignored if the API was deleted."""
        with self._engine.begin() as connection:
            if _exists(connection, api):
                statement = insert_for(connection, drifts).values(api=api, data=data)
                connection.execute(statement.on_conflict_do_update(index_elements=["api"], set_={"data": data}))

    def predictions(self, api: str, model_type: str, request_ids: Collection[str]) -> dict[str, str]:
        """Return the predictions of those requests that have a stored ground truth."""
        found: dict[str, str] = {}
        with self._reading.connect() as connection:
            for chunk in _chunks(request_ids):
                query = select(truths.c.request_id, truths.c.prediction).where(
                    truths.c.api == api, truths.c.model_type == model_type, truths.c.request_id.in_(chunk)
                )
                found |= {row.request_id: row.prediction for row in connection.execute(query)}
        return found

    def add_truths(self, api: str, model_type: str, new: Collection[GroundTruth]) -> None:
        """Store ground truth, at most one per request, replacing earlier ones; ignored if the API was deleted."""
        for chunk in _chunks(new):
            with self._engine.begin() as connection:
                if _exists(connection, api):
                    _add(connection, api, model_type, chunk)

    def hours(self, api: str, model_type: str) -> dict[int, ErrorSums]:
        """Return the sums by hour, oldest first."""
        query = select(truth_hours).where(truth_hours.c.api == api, truth_hours.c.model_type == model_type)
        with self._reading.connect() as connection:
            rows = connection.execute(query.order_by(truth_hours.c.hour))
            return {row.hour: ErrorSums(row.told, row.error, row.absolute, row.squared) for row in rows if row.told}

    def forget_before(self, hour: int) -> None:
        """Delete the ground truth of predictions before that hour."""
        with self._engine.begin() as connection:
            connection.execute(delete(truths).where(truths.c.hour < hour))
            connection.execute(delete(truth_hours).where(truth_hours.c.hour < hour))


def _chunks(items: Collection[Item]) -> Iterator[Sequence[Item]]:
    whole = list(items)
    for start in range(0, len(whole), _CHUNK):
        yield whole[start : start + _CHUNK]


def _exists(connection: Connection, api: str) -> bool:
    return connection.execute(select(apis.c.name).where(apis.c.name == api)).first() is not None


def _add(connection: Connection, api: str, model_type: str, new: Sequence[GroundTruth]) -> None:
    ids = [truth.request_id for truth in new]
    before = connection.execute(select(truths).where(truths.c.api == api, truths.c.request_id.in_(ids))).all()
    changes: dict[tuple[str, int], ErrorSums] = {}
    for row in before:
        _change(changes, (row.model_type, row.hour), row.error, -1)
    for truth in new:
        _change(changes, (model_type, truth.hour), truth.error, 1)
    connection.execute(delete(truths).where(truths.c.api == api, truths.c.request_id.in_(ids)))
    connection.execute(insert(truths), [{"api": api, "model_type": model_type, **vars(truth)} for truth in new])
    _change_hours(connection, api, changes)


def _change(changes: dict[tuple[str, int], ErrorSums], key: tuple[str, int], error: float, sign: int) -> None:
    error = min(max(error, -MAX_ERROR), MAX_ERROR)  # old rows may contain infinities; their difference is not a number
    more = ErrorSums(sign, sign * error, sign * abs(error), sign * error * error)
    changes[key] = changes.get(key, ErrorSums()) + more


def _change_hours(connection: Connection, api: str, changes: Mapping[tuple[str, int], ErrorSums]) -> None:
    for (model_type, hour), sums in changes.items():
        statement = insert_for(connection, truth_hours).values(api=api, model_type=model_type, hour=hour, **vars(sums))
        added = {name: truth_hours.c[name] + statement.excluded[name] for name in vars(sums)}
        connection.execute(statement.on_conflict_do_update(index_elements=["api", "model_type", "hour"], set_=added))
