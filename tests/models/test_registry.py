"""The registry without caching, and failing loads."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortex.errors import ModelError, UserError
from cortex.models import loader
from cortex.models.loader import LoadRequest
from cortex.models.spec import DEFAULT_MODEL, ModelPath, ModelSource
from cortex.processes.backoff import Backoff
from harness.models.registry_bench import Bench, in_threads
from harness.wait import wait_until


class TestWithoutCaching:
    def test_the_latest_of_every_model_is_loaded_before_serving(self, bench: Bench) -> None:
        bench.store.add("a", "9")
        bench.store.add("a", "10")
        bench.store.add("b", "1")
        bench.registry.load_latest()
        assert bench.loaded() == {"a": ["10"], "b": ["1"]}
        assert bench.registry.get("a")["number"] == "10"
        assert bench.events.loading_ == [("a", "10"), ("b", "1")]
        assert bench.events.sets[-1] == [("a", "10"), ("b", "1")]
        assert not bench.fetcher.fetched

    def test_previously_requested_versions_are_loaded_if_they_still_exist(self, bench: Bench) -> None:
        bench.store.add("a", "1")
        bench.store.add("a", "2")
        bench.registry.load_latest(extra_versions=[("a", "1"), ("a", "7"), ("x", "1")])
        assert bench.loaded() == {"a": ["1", "2"]}

    def test_other_versions_are_loaded_once_at_first_use_and_stay(self, bench: Bench) -> None:
        bench.store.add("a", "1")
        bench.store.add("a", "2")
        bench.registry.load_latest()
        found = in_threads(20, lambda: bench.registry.get("a", "1"))
        assert bench.loader.loads["a"] == 2
        assert all(model is found[0] for model in found)
        assert bench.registry.get("a", "1") is found[0]

    def test_names_are_not_cached_where_any_name_means_the_one_model(self, bench: Bench) -> None:
        bench.store.add(DEFAULT_MODEL)
        bench.source = ModelSource("python", (ModelPath(DEFAULT_MODEL, str(bench.store.folder)),))
        bench.registry.load_latest()
        assert bench.registry.get("first") is bench.registry.get() is bench.registry.get({})  # type: ignore[arg-type]
        tracemalloc.start()
        try:
            for number in range(200):
                bench.registry.get(f"{number}" * 5000)
            assert tracemalloc.get_traced_memory()[0] < 1_000_000
        finally:
            tracemalloc.stop()

    def test_a_model_that_fails_to_load_is_reported_with_the_cause(self, bench: Bench) -> None:
        bench.store.add("a")
        bench.store.add_raw("b", b"no pickle")
        with pytest.raises(ModelError, match=r"failed \(re-\)loading model b of version 1: UnpicklingError") as raised:
            bench.registry.load_latest()
        assert type(raised.value.__cause__).__name__ == "UnpicklingError"
        assert bench.events.failures[0][:2] == ("b", "1")

    def test_unchanged_versions_stay_and_removed_ones_are_unloaded_once_unused(self, bench: Bench) -> None:
        for name in ("a", "b"):
            bench.store.add(name)
        bench.registry.load_latest()
        kept, in_use = bench.registry.get("a"), bench.registry.get("b")
        bench.store.remove("b")
        bench.update()
        with pytest.raises(ModelError, match="'b' model wasn't found"):
            bench.registry.get("b")
        assert bench.registry.get("a") is kept
        assert bench.loader.is_live(in_use)
        bench.loader.live.clear()  # it refers to the models too
        unloaded: list[Any] = []
        bench.loader.unload = unloaded.append  # type: ignore[method-assign]
        del in_use
        wait_until(lambda: unloaded)
        assert unloaded[0]["name"] == "b"
        assert bench.events.sets[-1] == [("a", "1")]

    def test_without_caching_a_changed_version_is_served_as_it_was_loaded(self, bench: Bench) -> None:
        bench.store.add("a", mark="old")
        bench.registry.load_latest()
        bench.store.add("a", mark="new")
        bench.update()
        assert bench.registry.get("a")["mark"] == "old"
        assert bench.loader.loads["a"] == 1

    def test_a_new_latest_version_is_loaded_on_request(self, bench: Bench) -> None:
        bench.store.add("a", "9")
        bench.registry.load_latest()
        assert bench.registry.get("a")["number"] == "9"
        bench.store.add("a", "10")
        bench.update()
        assert bench.registry.get("a")["number"] == "10"

    def test_describe_returns_versions_and_timestamps(self, bench: Bench) -> None:
        bench.store.add("a", "9")
        bench.store.add("a", "10")
        bench.registry.load_latest()
        described = bench.registry.describe()["a"]
        assert described["versions"] == ["9", "10"]
        assert described["loaded"] == ["10"]
        assert all(isinstance(stamp, int) and stamp > 1_700_000_000 for stamp in described["timestamps"])

    def test_close_unloads_everything(self, bench: Bench) -> None:
        bench.store.add("a")
        bench.registry.load_latest()
        bench.registry.close()
        assert not bench.loader.live


class TestFailures:
    def test_concurrent_calls_share_one_failed_attempt(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=2)
        bench.store.add_raw("a", b"no pickle")
        errors = in_threads(50, lambda: bench.registry.get("a"))
        assert bench.loader.loads["a"] == 1
        assert len({str(error) for error in errors}) == 1
        assert all(type(error) is ModelError for error in errors)
        assert len(bench.events.failures) == 1

    def test_the_error_has_the_users_traceback(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)

        def fail(request: LoadRequest) -> None:
            raise UserError("ValueError: bad weights", 'File "handler.py", line 3, in load_model')

        bench.loader.before = fail
        with pytest.raises(ModelError) as raised:
            bench.registry.get("a")
        assert str(raised.value) == "failed (re-)loading model a of version 1: ValueError: bad weights"
        assert raised.value.traceback == 'File "handler.py", line 3, in load_model'
        assert isinstance(raised.value.__cause__, UserError)
        assert bench.events.failures[0][3] == raised.value.traceback

    def test_a_failed_load_is_retried_after_the_delay(
        self, cached: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loader, "RETRY_BACKOFF", Backoff(0.05, 60.0))
        bench = cached(cache_size=1)
        bench.store.add_raw("a", b"no pickle")
        with pytest.raises(ModelError):
            bench.registry.get("a")
        bench.loader.before = lambda request: (Path(request.path) / "model.pkl").write_bytes(b"N.")

        def is_well() -> bool:
            try:
                return bench.registry.get("a") is None
            except ModelError:
                return False

        wait_until(is_well)

    def test_other_content_is_loaded_without_delay(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=1)
        bench.store.add_raw("a", b"no pickle")
        with pytest.raises(ModelError):
            bench.registry.get("a")
        bench.store.add("a")
        bench.update()
        assert bench.registry.get("a")["name"] == "a"

    def test_a_failure_does_not_reference_a_partially_loaded_model(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)

        class Half:
            pass

        seen = []

        def fail(request: LoadRequest) -> None:
            half = Half()
            seen.append(weakref.ref(half))
            raise ValueError("no")

        bench.loader.before = fail
        with pytest.raises(ModelError) as raised:
            bench.registry.get("a")
        del raised
        gc.collect()
        assert seen[0]() is None

    def test_content_that_cannot_be_fetched_is_an_error(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)
        bench.registry.get("a")
        bench.store.add("b")
        bench.update()
        bench.store.remove("b")
        with pytest.raises(ModelError, match=r"failed \(re-\)loading model b of version 1: .* can't be fetched"):
            bench.registry.get("b")

    def test_sys_exit_while_loading_ends_the_call_only(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)

        def leave(request: LoadRequest) -> None:
            raise SystemExit(3)

        bench.loader.before = leave
        with pytest.raises(ModelError, match="SystemExit: 3"):
            bench.registry.get("a")

    def test_a_model_may_be_none(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=1)
        bench.store.add_raw("a", b"N.")
        assert bench.registry.get("a") is None
        assert bench.registry.get("a") is None
        assert bench.loader.loads["a"] == 1
