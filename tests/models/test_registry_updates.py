"""The registry with caching while the catalogue changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cortex.errors import ModelError
from cortex.models import loader, memory_budget
from cortex.models.loaded_models import call_scope
from cortex.models.loader import LoadRequest
from cortex.processes.backoff import Backoff
from harness.models.registry_bench import Bench
from harness.wait import wait_until


class TestUpdatesWithCaching:
    def test_the_old_version_is_served_while_the_new_one_loads(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=2)
        bench.store.add("a", "9")
        bench.registry.get("a")
        loading = threading.Event()
        bench.loader.before = lambda request: loading.wait(10)
        bench.store.add("a", "10")
        bench.update()
        wait_until(lambda: bench.loader.loads["a"] == 2)
        assert bench.registry.get("a")["number"] == "9"
        assert bench.registry.find("a")[1].number == "9"
        loading.set()
        wait_until(lambda: bench.registry.get("a")["number"] == "10")
        assert bench.registry.get("a", "9")["number"] == "9"
        assert bench.loader.loads["a"] == 2

    def test_new_content_of_a_loaded_version_replaces_it(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=2)
        with call_scope():
            old = bench.registry.get("a")
            bench.store.add("a", mark="new")
            bench.update()
            with ThreadPoolExecutor(1) as pool:
                wait_until(lambda: pool.submit(bench.registry.get, "a").result()["mark"] == "new")
            assert bench.loader.is_live(old)
        wait_until(lambda: not bench.loader.is_live(old))
        assert bench.events.sets[-1] == [("a", "1")]

    def test_without_room_for_both_the_old_version_is_evicted_once_unused(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)
        with call_scope():
            bench.registry.get("a")
            bench.store.add("a", mark="new")
            bench.update()
            wait_until(lambda: bench.fetcher.fetched["a"] == 2)
            assert bench.registry.get("a")["mark"] is None
        wait_until(lambda: bench.registry.get("a")["mark"] == "new")
        assert bench.loader.most == 1

    def test_overlapping_calls_do_not_keep_the_old_version_for_ever(
        self, cached: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory_budget, "_PATIENCE_S", 0.0)
        bench = cached("a", cache_size=1)
        overlapping = [call_scope(), call_scope()]

        def begin(call: call_scope) -> Any:
            call.__enter__()
            return bench.registry.get("a")["mark"]

        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            one.submit(begin, overlapping[0]).result(60)
            bench.store.add("a", mark="new")
            bench.update()
            wait_until(lambda: not bench.loaded())
            later = other.submit(begin, overlapping[1])
            assert bench.loader.loads["a"] == 1
            one.submit(overlapping[0].__exit__, None, None, None).result(60)
            assert later.result(60) == "new"
            other.submit(overlapping[1].__exit__, None, None, None).result(60)

    def test_another_model_is_evicted_before_the_old_version(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.registry.get("a")
        bench.registry.get("b")
        loading = threading.Event()
        bench.loader.before = lambda request: loading.wait(10)
        bench.store.add("a", mark="new")
        bench.update()
        wait_until(lambda: bench.loader.loads["a"] == 2)
        assert bench.loaded() == {"a": ["1"]}
        assert bench.registry.get("a")["mark"] is None
        loading.set()
        wait_until(lambda: bench.registry.get("a")["mark"] == "new")
        assert bench.loader.most == 2

    def test_a_version_that_fails_to_load_leaves_the_old_one_served(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=2)
        bench.store.add("a", "1")
        bench.registry.get("a")
        bench.store.add_raw("a", b"no pickle", "2")
        bench.update()
        wait_until(lambda: bench.events.failures)
        assert bench.events.failures[0][:2] == ("a", "2")
        assert bench.registry.get("a")["number"] == "1"
        bench.store.add("a", "2")
        bench.update()
        wait_until(lambda: bench.registry.get("a")["number"] == "2")

    def test_a_failed_background_load_is_retried(
        self, cached: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loader, "RETRY_BACKOFF", Backoff(0.05, 60.0))
        bench = cached("a", cache_size=2)
        bench.registry.get("a")

        def fail_once(request: LoadRequest) -> None:
            if bench.loader.loads["a"] == 2:
                raise OSError("for a moment")

        bench.loader.before = fail_once
        bench.store.add("a", mark="new")
        bench.update()
        wait_until(lambda: bench.registry.get("a")["mark"] == "new")
        assert len(bench.events.failures) == 1

    def test_when_the_latest_version_is_deleted_the_previous_one_is_served(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=2)
        bench.store.add("a", "9")
        bench.store.add("a", "10")
        bench.registry.get("a")
        bench.store.remove("a", "10")
        bench.update()
        wait_until(lambda: bench.registry.get("a")["number"] == "9")
        with pytest.raises(ModelError, match="model a of version 10 wasn't found"):
            bench.registry.get("a", "10")
        wait_until(lambda: len(bench.loader.live) == 1)

    def test_removed_models_are_unloaded_once_unused(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        with call_scope():
            model = bench.registry.get("a")
            bench.store.remove("a")
            bench.update()
            with pytest.raises(ModelError, match="'a' model wasn't found"):
                bench.registry.get("a")
            assert bench.loader.is_live(model)
        wait_until(lambda: not bench.loader.live)
        assert bench.events.sets[-1] == []

    def test_an_update_does_not_load_unloaded_models(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.registry.get("a")
        bench.store.add("b", "2")
        bench.update()
        assert bench.registry.get("b")["number"] == "2"
        assert bench.loader.loads == {"a": 1, "b": 1}

    def test_a_model_removed_during_its_load_is_unloaded(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)

        def remove(request: LoadRequest) -> None:
            bench.store.remove("a")
            bench.update()

        bench.loader.before = remove
        assert bench.registry.get("a")["name"] == "a"
        wait_until(lambda: not bench.loader.live)

    def test_content_replaced_during_its_load_is_loaded_again(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=2)

        def replace(request: LoadRequest) -> None:
            bench.loader.before = lambda request: None
            bench.store.add("a", mark="new")
            bench.update()

        bench.loader.before = replace
        bench.registry.get("a")
        wait_until(lambda: bench.registry.get("a")["mark"] == "new")
