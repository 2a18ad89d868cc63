"""The LRU cache of loaded models and the scope of calls."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.models.loaded_models import (
    CallHandle,
    LoadedModel,
    LoadedModels,
    call_scope,
    choose_eviction,
    current_call,
    ensure_call_scope,
    with_call_scope,
)
from cortex.models.spec import Version

HERE, ELSEWHERE = "here", "elsewhere"


def holder(place: object = ELSEWHERE, waiting: int = 0) -> CallHandle:
    made = CallHandle()
    made.context, made.waiting = place, waiting
    return made


def entry(name: str, *holders: CallHandle) -> LoadedModel[object]:
    return LoadedModel(name, Version("1", name, 1, 0.0), name, handles=set(holders))


def test_the_least_recently_used_unpinned_model_is_evicted_first() -> None:
    entries = [entry("a", holder()), entry("b"), entry("c")]
    assert choose_eviction(entries, None, HERE) == (entries[1], False)


def test_models_pinned_only_by_the_requesting_call_are_evicted_next() -> None:
    me = holder(HERE, waiting=1)
    entries = [entry("a", holder()), entry("b", me, holder()), entry("c", me)]
    assert choose_eviction(entries, me, HERE) == (entries[2], False)


def test_models_pinned_by_a_running_call_are_waited_for() -> None:
    assert choose_eviction([entry("a", holder()), entry("b", holder(waiting=1))], None, HERE) == (None, True)


def test_one_model_is_evicted_if_all_calls_wait() -> None:
    entries = [entry("a", holder(waiting=1)), entry("b", holder(HERE))]
    assert choose_eviction(entries, None, HERE) == (entries[0], False)


def test_evict_last_is_evicted_last() -> None:
    spared, other = entry("a"), entry("b")
    assert choose_eviction([spared, other], None, HERE, spared) == (other, False)
    assert choose_eviction([spared], None, HERE, spared) == (spared, False)
    assert choose_eviction([spared, entry("c", holder())], None, HERE, spared) == (None, True)


def test_with_nothing_loaded_there_is_nothing_to_wait_for() -> None:
    assert choose_eviction([], None, HERE) == (None, False)


@given(st.lists(st.lists(st.tuples(st.sampled_from([HERE, ELSEWHERE]), st.integers(0, 1)), max_size=3), max_size=6))
def test_models_pinned_by_running_calls_are_never_evicted(held: list[list[tuple[str, int]]]) -> None:
    entries = [entry(str(number), *(holder(*each) for each in holders)) for number, holders in enumerate(held)]
    victim, may_wait = choose_eviction(entries, None, HERE)
    if victim is not None:
        assert all(each.waiting or each.context == HERE for each in victim.handles)
        assert not may_wait
    else:
        assert may_wait == bool(entries)


def test_a_handle_that_has_ended_pins_nothing() -> None:
    shelf: LoadedModels[object] = LoadedModels()
    loaded, ended = entry("a"), holder()
    ended.has_ended = True
    with shelf.changed:
        shelf.put(loaded)
        shelf.find(loaded.key, ended)
    assert not loaded.handles


def test_a_replaced_version_is_retired_and_stays_pinned_until_released() -> None:
    shelf: LoadedModels[object] = LoadedModels()
    old, new, user = entry("a"), entry("a"), holder()
    with shelf.changed:
        shelf.put(old)
        shelf.find(old.key, user)
        shelf.put(new)
        assert shelf.find(new.key, None) is new
    assert shelf.retired == [old]
    assert old.handles == {user}
    shelf.release(user)
    assert not old.handles


def test_release_abandoned_unpins_the_models_of_an_abandoned_handle() -> None:
    shelf: LoadedModels[object] = LoadedModels()
    loaded, user = entry("a"), holder()
    with shelf.changed:
        shelf.put(loaded)
        shelf.find(loaded.key, user)
        shelf.release_later(user)
        assert loaded.handles
        shelf.release_abandoned()
    assert not loaded.handles


class Pins:
    """A fake `LoadedModels` that records pinned handles."""

    def __init__(self) -> None:
        self.held: set[CallHandle] = set()

    def take(self) -> CallHandle | None:
        holder = current_call()
        if holder is not None and holder not in self.held:
            self.held.add(holder)
            holder.pinned_in.append(self)
        return holder

    def release(self, holder: CallHandle) -> None:
        self.held.discard(holder)

    release_later = release


@pytest.fixture
def pins() -> Pins:
    return Pins()


def test_outside_of_calls_nothing_is_pinned(pins: Pins) -> None:
    assert pins.take() is None


def test_a_scope_ends_with_its_block(pins: Pins) -> None:
    with call_scope():
        pins.take()
        assert pins.held
    assert not pins.held
    assert current_call() is None


def test_a_plain_call_is_a_scope_and_keeps_arguments_and_result(pins: Pins) -> None:
    @with_call_scope
    def predict(a: int, b: int) -> int:
        pins.take()
        assert pins.held
        return a - b

    assert predict(5, b=2) == 3
    assert not pins.held


def test_a_scope_ends_when_the_call_raises(pins: Pins) -> None:
    @with_call_scope
    def predict() -> None:
        pins.take()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        predict()
    assert not pins.held
    assert current_call() is None


async def test_a_coroutine_pins_until_it_is_done(pins: Pins) -> None:
    going = asyncio.Event()

    async def predict() -> int:
        pins.take()
        await going.wait()
        assert current_call() is not None
        return 7

    task = asyncio.create_task(with_call_scope(predict)())
    await asyncio.sleep(0)
    assert len(pins.held) == 1
    assert current_call() is None
    going.set()
    assert await task == 7
    assert not pins.held


async def test_two_coroutines_on_one_loop_are_two_calls(pins: Pins) -> None:
    async def predict(going: asyncio.Event) -> None:
        first = pins.take()
        await going.wait()
        assert pins.take() is first

    events = [asyncio.Event(), asyncio.Event()]
    tasks = [asyncio.create_task(with_call_scope(predict)(event)) for event in events]
    await asyncio.sleep(0)
    assert len(pins.held) == 2
    events[0].set()
    await tasks[0]
    assert len(pins.held) == 1
    events[1].set()
    await tasks[1]
    assert not pins.held


async def test_a_cancelled_coroutine_pins_nothing(pins: Pins) -> None:
    async def predict() -> None:
        pins.take()
        await asyncio.Event().wait()

    task = asyncio.create_task(with_call_scope(predict)())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not pins.held


def test_models_of_a_plain_call_stay_pinned_for_the_coroutine_that_it_returns(pins: Pins) -> None:
    @with_call_scope
    def predict() -> Any:
        pins.take()

        async def rest() -> int:
            assert pins.take() in pins.held
            return len(pins.held)

        return rest()

    result = predict()
    assert pins.held
    assert asyncio.run(result) == 1
    assert not pins.held


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_dropped_coroutine_pins_nothing(pins: Pins) -> None:
    @with_call_scope
    def predict() -> Any:
        pins.take()

        async def rest() -> None: ...

        return rest()

    result = predict()
    assert pins.held
    del result
    gc.collect()
    assert not pins.held


def test_a_generator_pins_until_its_end_on_any_thread(pins: Pins) -> None:
    @with_call_scope
    def predict() -> Iterator[CallHandle | None]:
        yield pins.take()
        yield pins.take()
        assert current_call() is not None

    chunks = predict()
    assert not pins.held
    first = next(chunks)
    assert pins.held == {first}
    assert current_call() is None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(next, chunks).result() is first
        assert pool.submit(next, chunks, "end").result() == "end"
    assert not pins.held


def test_a_closed_generator_cleans_up_inside_the_scope(pins: Pins) -> None:
    seen = []

    @with_call_scope
    def predict() -> Iterator[int]:
        try:
            pins.take()
            yield 1
        finally:
            seen.append(current_call())

    chunks = predict()
    next(chunks)
    chunks.close()
    assert seen[0] is not None
    assert not pins.held


def test_a_generator_dropped_before_its_first_chunk_pins_nothing(pins: Pins) -> None:
    @with_call_scope
    def predict() -> Any:
        pins.take()
        return (number for number in range(3))

    result = predict()
    assert pins.held
    result.close()
    del result
    gc.collect()
    assert not pins.held


def test_a_generator_that_raises_pins_nothing(pins: Pins) -> None:
    @with_call_scope
    def predict() -> Iterator[int]:
        pins.take()
        yield 1
        raise ValueError("no")

    chunks = predict()
    next(chunks)
    with pytest.raises(ValueError, match="no"):
        next(chunks)
    assert not pins.held


async def test_an_async_generator_pins_until_its_end(pins: Pins) -> None:
    @with_call_scope
    async def predict() -> AsyncIterator[CallHandle | None]:
        yield pins.take()
        await asyncio.sleep(0)
        yield pins.take()

    holders = []
    async for holder in predict():
        holders.append(holder)
        assert len(pins.held) == 1
        assert current_call() is None
    assert len(set(holders)) == 1
    assert not pins.held


async def test_a_closed_async_generator_pins_nothing(pins: Pins) -> None:
    @with_call_scope
    async def predict() -> AsyncIterator[int]:
        pins.take()
        yield 1
        yield 2

    chunks = predict()
    assert await anext(chunks) == 1
    assert pins.held
    await chunks.aclose()
    assert not pins.held


def test_a_coroutine_may_return_a_generator(pins: Pins) -> None:
    @with_call_scope
    async def predict() -> Iterator[int]:
        pins.take()
        return (number for number in range(2))

    result = asyncio.run(predict())
    assert pins.held
    assert list(result) == [0, 1]
    assert not pins.held


def test_a_thread_that_the_call_starts_with_its_context_is_part_of_it(pins: Pins) -> None:
    @with_call_scope
    async def predict() -> bool:
        return await asyncio.to_thread(pins.take) is current_call()

    assert asyncio.run(predict())
    assert not pins.held


async def test_code_that_outlives_the_call_is_outside_of_calls(pins: Pins) -> None:
    ended = asyncio.Event()
    tasks: list[asyncio.Task[CallHandle | None]] = []

    async def background() -> CallHandle | None:
        await ended.wait()
        return pins.take()

    @with_call_scope
    async def predict() -> None:
        tasks.append(asyncio.create_task(background()))

    await predict()
    ended.set()
    assert await tasks[0] is None
    assert not pins.held


def test_code_on_a_user_thread_gets_its_own_scope(pins: Pins) -> None:
    with ensure_call_scope():
        assert pins.take() in pins.held
    assert not pins.held

    def work() -> CallHandle | None:
        with ensure_call_scope():
            return pins.take()

    with call_scope(), ThreadPoolExecutor(1) as pool:
        mine = pins.take()
        assert pool.submit(work).result() is not mine
        with ensure_call_scope():
            assert pins.take() is mine
        assert pins.held == {mine}


def test_a_handle_has_the_loop_or_thread_of_its_call() -> None:
    @with_call_scope
    def sync_place() -> object:
        holder = current_call()
        assert holder is not None
        return holder.context

    async def main() -> object:
        return sync_place(), asyncio.get_running_loop()

    assert sync_place() == threading.get_ident()
    place, loop = asyncio.run(main())  # type: ignore[misc]
    assert place is loop
