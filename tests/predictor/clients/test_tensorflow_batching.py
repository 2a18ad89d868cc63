"""Runs of a model that are asked for at the same time become one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cortex.errors import ModelError
from cortex.payloads.arrays import Array
from cortex.predictor.clients.tensorflow import SignatureInfo
from cortex.predictor.clients.tensorflow_batching import BatchingServable
from cortex.predictor.clients.tensors import TensorSpec
from harness.wait import wait_until

DEADLINE_S = 20.0


class Doubling:
    """A model that doubles its input; its runs wait for `gate`, and it refuses rows that are negative."""

    def __init__(self, answer: Callable[[Array], Array] = lambda rows: rows * 2) -> None:
        self.signatures: Mapping[str, SignatureInfo] = {}
        self.gate = threading.Event()
        self.sizes: list[int] = []
        self._answer = answer

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = inputs["x"]
        self.sizes.append(len(rows) if rows.ndim else 0)
        assert self.gate.wait(DEADLINE_S)
        if (rows < 0).any():
            raise ModelError(f"{signature_key} refuses {rows.min()}")
        return {"y": self._answer(rows)}


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def ask(pool: ThreadPoolExecutor, joined: BatchingServable[Doubling], values: list[Any]) -> list[Future[Any]]:
    """Start a run, let others come while it goes on, then let all end."""
    model, waiting = joined.servable, joined._queues

    def run(value: Any) -> Any:
        return joined.run("sign", {"x": np.asarray(value)})["y"].tolist()

    asked = [pool.submit(run, values[0])]
    wait_until(lambda: model.sizes)
    asked += [pool.submit(run, value) for value in values[1:]]
    wait_until(lambda: sum(len(line.waiting) for line in waiting.values()) + len(model.sizes) == len(values))
    model.gate.set()
    return asked


def outcome(future: Future[Any]) -> Any:
    error = future.exception(DEADLINE_S)
    return str(error) if error else future.result()


def test_a_single_run_starts_immediately() -> None:
    model = Doubling()
    model.gate.set()

    assert BatchingServable(model, 8, True).run("sign", {"x": np.array([3])})["y"].tolist() == [6]
    assert model.sizes == [1]


def test_runs_that_arrive_during_a_run_form_the_next_batch(pool: ThreadPoolExecutor) -> None:
    joined = BatchingServable(Doubling(), 16, True)

    asked = ask(pool, joined, [[1], [2, 3], [4]])

    assert [outcome(future) for future in asked] == [[2], [4, 6], [8]]
    assert joined.servable.sizes == [1, 3]


def test_a_batch_has_at_most_the_maximum_of_rows(pool: ThreadPoolExecutor) -> None:
    joined = BatchingServable(Doubling(), 4, True)

    asked = ask(pool, joined, [[number] for number in range(10)])

    assert [outcome(future) for future in asked] == [[2 * number] for number in range(10)]
    assert joined.servable.sizes == [1, 4, 4, 1]


def test_a_single_run_may_exceed_the_maximum_of_rows(pool: ThreadPoolExecutor) -> None:
    joined = BatchingServable(Doubling(), 2, True)

    assert [outcome(future) for future in ask(pool, joined, [[1], [2, 3, 4]])] == [[2], [4, 6, 8]]


def test_an_invalid_input_fails_alone(pool: ThreadPoolExecutor) -> None:
    joined = BatchingServable(Doubling(), 64, True)

    asked = ask(pool, joined, [[number] for number in range(17)] + [[-1]])

    assert [outcome(future) for future in asked[:17]] == [[2 * number] for number in range(17)]
    assert outcome(asked[17]) == "sign refuses -1"
    assert len(joined.servable.sizes) <= 2 + 2 * 5


def test_without_isolation_all_runs_of_a_batch_fail(pool: ThreadPoolExecutor) -> None:
    joined = BatchingServable(Doubling(), 64, isolates_failures=False)

    assert [outcome(future) for future in ask(pool, joined, [[1], [2], [-1]])] == [[2]] + 2 * ["sign refuses -1"]


@pytest.mark.parametrize("value", [[[1, 2]], [1.5], [[1], [2]]])
def test_inputs_of_another_shape_or_type_run_separately(pool: ThreadPoolExecutor, value: Any) -> None:
    joined = BatchingServable(Doubling(), 8, True)
    joined.servable.gate.set()

    asked = [pool.submit(joined.run, "sign", {"x": np.asarray(given)}) for given in (value, [1], value)]

    assert [future.result(DEADLINE_S)["y"].shape for future in asked] == [np.shape(value), (1,), np.shape(value)]


def test_inputs_without_rows_run_alone() -> None:
    model = Doubling()
    model.gate.set()

    assert BatchingServable(model, 8, True).run("sign", {"x": np.asarray(4)})["y"] == 8


def test_stops_batching_a_model_whose_outputs_have_no_rows(pool: ThreadPoolExecutor) -> None:
    joined = BatchingServable(Doubling(lambda rows: rows.sum()), 8, True)

    asked = ask(pool, joined, [[1], [2], [3]])

    assert [outcome(future) for future in asked] == [1, 2, 3]
    joined.run("sign", {"x": np.array([5])})
    assert joined.servable.sizes == [1, 1, 1, 1]


def test_an_output_of_fixed_size_is_not_split(pool: ThreadPoolExecutor) -> None:
    joined = BatchingServable(Doubling(lambda rows: np.array([7, 8])), 8, True)

    asked = ask(pool, joined, [[1], [2], [3]])

    assert [outcome(future) for future in asked] == [[7, 8]] * 3, "two rows, but not one for each"


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("shape", [(1,), (2,), (2, None), ()])
def test_signatures_with_a_fixed_number_of_rows_are_not_batched(
    pool: ThreadPoolExecutor, side: str, shape: tuple[int | None, ...]
) -> None:
    sides = {"inputs": {"x": TensorSpec(1, (None,))}, "outputs": {"y": TensorSpec(1, None)}}
    model = Doubling()
    model.signatures = {"sign": SignatureInfo(**{**sides, side: {"x": TensorSpec(1, shape)}})}
    model.gate.set()
    joined = BatchingServable(model, 8, isolates_failures=False)

    asked = [pool.submit(joined.run, "sign", {"x": np.array([number])}) for number in range(20)]

    assert [future.result(DEADLINE_S)["y"].tolist() for future in asked] == [[2 * number] for number in range(20)]
    assert model.sizes == [1] * 20


def test_each_of_many_threads_gets_its_own_rows(pool: ThreadPoolExecutor) -> None:
    model = Doubling()
    model.gate.set()
    joined = BatchingServable(model, 16, True)

    def run(number: int) -> bool:
        return bool(joined.run("sign", {"x": np.array([number])})["y"].tolist() == [2 * number])

    assert all(pool.map(run, range(2000)))
    assert sum(model.sizes) == 2000
    assert not joined._queues
