"""The registry with caching: limits, single loads, and no eviction of models in use."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cortex.errors import ModelError
from cortex.models import memory_budget
from cortex.models.loaded_models import call_scope, with_call_scope
from cortex.models.loader import LoadRequest
from harness.models.registry_bench import Bench, in_threads
from harness.wait import PATIENCE_S, wait_until

MIB = 1024 * 1024


class TestCaching:
    def test_nothing_is_loaded_before_the_first_call(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.registry.load_latest(extra_versions=[("a", "1")])
        assert not bench.loader.loads

    def test_concurrent_first_calls_fetch_and_load_once(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)
        found = in_threads(100, lambda: bench.registry.get("a"))
        assert bench.fetcher.fetched["a"] == bench.loader.loads["a"] == 1
        assert all(model is found[0] for model in found)
        assert sum(bench.fetcher.released.values()) == 1

    def test_the_least_recently_used_model_is_evicted_before_the_next_load(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", "c", cache_size=2)
        for name in ("a", "b", "a", "c"):
            bench.registry.get(name)
        assert bench.loaded() == {"a": ["1"], "c": ["1"]}
        assert bench.loader.most == 2

    def test_each_version_counts_against_the_limit(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=1)
        bench.store.add("a", "1")
        bench.store.add("a", "2")
        assert bench.registry.get("a", "1")["number"] == "1"
        assert bench.registry.get("a")["number"] == "2"
        assert bench.loaded() == {"a": ["2"]}

    def test_one_model_is_loaded_at_a_time_while_others_are_fetched(self, cached: Callable[..., Bench]) -> None:
        names = [f"m{number}" for number in range(6)]
        bench = cached(*names, cache_size=6)
        next_names = iter(names)
        models = in_threads(6, lambda: bench.registry.get(next(next_names)))
        assert sorted(model["name"] for model in models) == names
        assert bench.loader.at_once == 1

    def test_a_load_waits_for_a_model_in_use(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)
        with ThreadPoolExecutor(1) as pool:
            with call_scope():
                model = bench.registry.get("a")
                other = pool.submit(bench.registry.get, "b")
                wait_until(lambda: bench.fetcher.fetched["b"])
                assert bench.loader.is_live(model)
                assert not other.done()
            assert other.result(PATIENCE_S)["name"] == "b"
        assert not bench.loader.is_live(model)

    def test_a_load_without_room_fails_and_names_the_models_in_use(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1, timeout_s=0)
        with call_scope(), ThreadPoolExecutor(1) as pool:
            bench.registry.get("a")
            error = pool.submit(bench.registry.get, "b").exception(10)
        assert str(error) == (
            "there is no room to load model b of version 1 within cache_size: 1; in use: a of version 1; "
            "raise the limit, or allow fewer concurrent requests"
        )
        assert not bench.events.failures
        assert bench.registry.get("b")["name"] == "b"

    def test_a_call_that_needs_two_models_where_one_fits_loses_its_first(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)
        with call_scope():
            first = bench.registry.get("a")
            assert bench.registry.get("b")["name"] == "b"
            assert first["name"] == "a"
        assert bench.loader.most == 1

    def test_calls_that_pin_each_others_room_do_not_deadlock(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", "c", cache_size=2)
        barrier = threading.Barrier(2)

        def predict(first: str, second: str) -> str:
            with call_scope():
                bench.registry.get(first)
                barrier.wait(60)
                bench.registry.get("c" if second == "a" else "a")
                return str(bench.registry.get(second)["name"])

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(predict, "a", "b"), pool.submit(predict, "b", "a")]
            assert [future.result(PATIENCE_S) for future in futures] == ["b", "a"]
        assert bench.loader.most == 2

    def test_a_load_does_not_wait_for_coroutines_of_the_blocked_loop(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)

        async def main() -> str:
            going = asyncio.Event()

            async def predict(name: str) -> str:
                model = bench.registry.get(name)
                if name == "a":
                    await going.wait()
                return str(model["name"])

            first = asyncio.create_task(with_call_scope(predict)("a"))
            await asyncio.sleep(0)
            second = await with_call_scope(predict)("b")
            going.set()
            return await first + second

        assert asyncio.run(asyncio.wait_for(main(), PATIENCE_S)) == "ab"

    def test_loading_a_model_may_load_another(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.loader.before = lambda request: request.model == "a" and bench.registry.get("b")
        assert bench.registry.get("a")["name"] == "a"
        assert bench.loaded() == {"a": ["1"], "b": ["1"]}

    def test_loading_a_model_may_need_one_that_another_thread_is_about_to_load(
        self, cached: Callable[..., Bench]
    ) -> None:
        bench = cached("a", "b", cache_size=2)
        with ThreadPoolExecutor(1) as pool:
            futures = []

            def before(request: LoadRequest) -> None:
                if request.model == "a":
                    futures.append(pool.submit(bench.registry.get, "b"))
                    wait_until(lambda: bench.fetcher.fetched["b"])
                    bench.registry.get("b")

            bench.loader.before = before
            assert bench.registry.get("a")["name"] == "a"
            assert futures[0].result(PATIENCE_S)["name"] == "b"

    @pytest.mark.heavy
    def test_a_thread_may_request_a_load_that_has_just_waited_for_it(self, cached: Callable[..., Bench]) -> None:
        for _ in range(8):
            bench = cached("a", "b", cache_size=2)
            with ThreadPoolExecutor(1) as pool:
                futures = []

                def both(bench: Bench = bench) -> Any:
                    bench.registry.get("b")
                    return bench.registry.get("a")

                def before(request: LoadRequest, bench: Bench = bench, pool: ThreadPoolExecutor = pool) -> None:
                    if request.model == "a":
                        futures.append(pool.submit(both))  # noqa: B023 - used within this round
                        wait_until(lambda: bench.fetcher.fetched["b"])
                        bench.registry.get("b")

                bench.loader.before = before
                assert bench.registry.get("a") is futures[0].result(PATIENCE_S)
            shutil.rmtree(bench.store.folder.parent)
            bench.store.folder.parent.mkdir()

    def test_a_model_that_needs_itself_is_an_error(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.loader.before = lambda request: bench.registry.get("b" if request.model == "a" else "a")
        with pytest.raises(ModelError, match="loading model a of version 1 requires this version itself"):
            bench.registry.get("a")

    def test_a_model_that_needs_another_where_one_fits_is_an_error_at_once(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)
        bench.loader.before = lambda request: request.model == "a" and bench.registry.get("b")
        with pytest.raises(ModelError, match="another model, which loads this one, uses all of it"):
            bench.registry.get("a")

    def test_models_pinned_by_a_dropped_result_can_be_evicted(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)

        @with_call_scope
        def predict() -> Any:
            name = bench.registry.get("a")["name"]
            return (name for _ in range(3))

        chunks = predict()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(bench.registry.get, "b")
            wait_until(lambda: bench.fetcher.fetched["b"])
            assert not other.done()
            del chunks
            assert other.result(PATIENCE_S)["name"] == "b"


class TestMemoryBudget:
    @pytest.mark.heavy
    def test_models_are_evicted_for_the_memory_of_the_next(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_memory_bytes=100 * MIB)
        for number in range(8):
            bench.store.add(f"m{number}", size_bytes=20 * MIB)
        for number in range(8):
            assert bench.registry.get(f"m{number}")["weights"].nbytes == 20 * MIB
        assert 3 <= len(bench.loader.live) <= 4
        assert bench.loader.most <= 5
        assert "m7" in bench.loaded()

    def test_files_above_the_budget_are_rejected_before_the_fetch(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_memory_bytes=16 * MIB)
        bench.store.add("big", size_bytes=20 * MIB)
        bench.registry.get("a")
        with pytest.raises(ModelError) as raised:
            bench.registry.get("big")
        assert str(raised.value) == (
            "model big of version 1 has files of 20 MiB, more than cache_memory: 16 MiB; set cache_memory above that"
        )
        assert not bench.fetcher.fetched["big"]
        assert bench.loaded() == {"a": ["1"]}
        assert bench.events.failures[0][0] == "big"

    def test_a_model_above_the_budget_in_memory_is_rejected_and_unloaded(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_memory_bytes=40 * MIB)
        bench.store.add_raw("a", b"cbuiltins\nbytearray\n(I80000000\ntR.")  # 80 MB of 40 bytes
        bench.loader.before = lambda request: None
        load = bench.loader.load

        def load_and_touch(request: LoadRequest) -> Any:
            model = load(request)
            model[::4096] = b"x" * len(model[::4096])
            return model

        bench.loader.load = load_and_touch  # type: ignore[method-assign]
        with pytest.raises(ModelError, match="model a of version 1 takes 7.* MiB, more than cache_memory: 40 MiB"):
            bench.registry.get("a")
        assert not bench.loader.live
        with pytest.raises(ModelError, match="takes 7.* MiB"):
            bench.registry.get("a")
        assert bench.loader.loads["a"] == 2  # once more, as libraries that are imported would be in memory by then

    def test_libraries_imported_with_the_first_model_do_not_count_as_its_memory(
        self, cached: Callable[..., Bench]
    ) -> None:
        memory_budget.collect_and_trim()  # or free memory of earlier tests would hide the growth
        bench = cached(cache_memory_bytes=60 * MIB)
        for number in range(3):
            bench.store.add(f"m{number}", size_bytes=10 * MIB)
        library: list[bytes] = []

        def import_library(request: LoadRequest) -> None:
            if not library:
                library.append(b"x" * (80 * MIB))

        bench.loader.before = import_library
        for number in range(3):
            bench.registry.get(f"m{number}")
        assert bench.loaded() == {"m0": ["1"], "m1": ["1"], "m2": ["1"]}
        assert bench.loader.loads == {"m0": 2, "m1": 1, "m2": 1}

    @pytest.mark.heavy
    def test_the_measured_size_of_a_model_survives_its_unloading(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_memory_bytes=70 * MIB)
        for number in range(3):
            bench.store.add(f"m{number}", size_bytes=20 * MIB)
        for _ in range(3):
            for number in range(3):
                bench.registry.get(f"m{number}")
                assert sum(model["weights"].nbytes for model in bench.loader.live) <= 70 * MIB


@pytest.mark.heavy
def test_get_stays_fast_and_correct_under_threads_and_updates(cached: Callable[..., Bench]) -> None:
    bench = cached("a", "b", "c", "d", cache_size=2)
    stop = threading.Event()

    @with_call_scope
    def predict(name: str) -> bool:
        model = bench.registry.get(name)
        return bool(model["name"] == name) and bench.loader.is_live(model)

    def work() -> int:
        done = 0
        while not stop.is_set() or done < 20:
            assert predict("abcd"[done % 4])
            done += 1
        return done

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(4)]
        for mark in range(10):
            bench.store.add("a", mark=mark)
            bench.update()
            assert not any(future.done() and future.exception() for future in futures)
        stop.set()
        assert all(future.result(PATIENCE_S) >= 20 for future in futures)
    assert bench.loader.most <= 2
    assert bench.loader.at_once == 1
    bench.registry.close()
