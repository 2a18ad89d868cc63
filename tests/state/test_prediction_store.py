"""Ground truths of predictions are stored once per request."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from cortex.config.schema import Api
from cortex.state.database import Where, open_state
from cortex.state.queries.apis import ApiChange, ApiStore
from cortex.state.queries.predictions import MAX_ERROR, ErrorSums, GroundTruth, PredictionStore
from cortex.state.revision import Revision

NUMBERS = "regression"


@pytest.fixture
def database(where: Where) -> Iterator[Engine]:
    engine = open_state(where)
    deploy(engine)
    yield engine
    engine.dispose()


def deploy(engine: Engine) -> None:
    api = Api.model_validate({"name": "iris", "handler": {"interface": "handler", "type": "python", "path": "h.py"}})
    ApiStore(engine).write([ApiChange(Revision("r", api, "project"), "nonce", "spec")])


def test_a_repeated_truth_replaces_the_earlier_one(database: Engine) -> None:
    store = PredictionStore(database)
    store.add_truths(
        "iris",
        NUMBERS,
        [GroundTruth("a", 7, "1.5", -2.0), GroundTruth("b", 7, "1", 0.5), GroundTruth("c", 8, "1", 1.0)],
    )

    assert store.hours("iris", NUMBERS) == {7: ErrorSums(2, -1.5, 2.5, 4.25), 8: ErrorSums(1, 1.0, 1.0, 1.0)}
    store.add_truths("iris", NUMBERS, [GroundTruth("a", 7, "1.5", 1.0)])
    assert store.hours("iris", NUMBERS)[7] == ErrorSums(2, 1.5, 1.5, 1.25)
    assert store.predictions("iris", NUMBERS, ["a", "c", "z"]) == {"a": "1.5", "c": "1"}
    assert store.predictions("iris", "classification", ["a"]) == {}


def test_truths_of_different_model_types_are_separate(database: Engine) -> None:
    store = PredictionStore(database)
    store.add_truths("iris", NUMBERS, [GroundTruth("a", 7, "1.5", -2.0)])
    store.add_truths("iris", "classification", [GroundTruth("a", 9, "00ff", 1.0)])

    assert store.hours("iris", NUMBERS) == {}
    assert store.hours("iris", "classification") == {9: ErrorSums(1, 1.0, 1.0, 1.0)}


def test_infinite_errors_are_limited_and_can_be_replaced(database: Engine) -> None:
    store = PredictionStore(database)
    for error in (math.inf, 1.0, -math.inf, -math.inf, 1e308):
        store.add_truths("iris", NUMBERS, [GroundTruth("a", 7, "1", error)])

    assert store.hours("iris", NUMBERS) == {7: ErrorSums(1, MAX_ERROR, MAX_ERROR, MAX_ERROR**2)}


def test_thousands_of_truths_are_stored_at_once(database: Engine) -> None:
    store = PredictionStore(database)
    store.add_truths("iris", NUMBERS, [GroundTruth(f"{number}", number % 2, "1", 1.0) for number in range(1201)])

    assert {hour: sums.told for hour, sums in store.hours("iris", NUMBERS).items()} == {0: 601, 1: 600}
    assert len(store.predictions("iris", NUMBERS, [str(number) for number in range(2000)])) == 1201


def test_old_truths_are_deleted(database: Engine) -> None:
    store = PredictionStore(database)
    store.add_truths("iris", NUMBERS, [GroundTruth("a", 7, "1", 1.0), GroundTruth("b", 8, "1", 1.0)])
    store.forget_before(8)

    assert list(store.hours("iris", NUMBERS)) == [8]
    assert list(store.predictions("iris", NUMBERS, ["a", "b"])) == ["b"]


def test_deleting_an_api_deletes_all_of_its_rows(database: Engine) -> None:
    store = PredictionStore(database)
    store.add_truths("iris", NUMBERS, [GroundTruth("a", 7, "1", 1.0)])
    store.set_drift("iris", "one")
    store.set_drift("iris", "two")
    assert store.drift("iris") == "two"

    ApiStore(database).write([], deletions=["iris"])
    store.set_drift("iris", "three")
    store.add_truths("iris", NUMBERS, [GroundTruth("b", 7, "1", 1.0)])
    deploy(database)

    assert store.drift("iris") is None
    assert store.hours("iris", NUMBERS) == {}
    assert store.predictions("iris", NUMBERS, ["a", "b"]) == {}
