"""What calls get: without caching, with it, while models change, and while loading fails."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cortex.errors import ModelError, UserError
from cortex.models import failures, room
from cortex.models.loading import LoadRequest
from cortex.models.registry import Registry
from cortex.models.scope import call_scope, in_scope
from cortex.models.spec import DEFAULT_MODEL, Catalogue, ModelPath, ModelSource
from local_models import FolderFetcher, PickleLoader, Store, Told
from wait import wait_until

MIB = 1024 * 1024


class Bench:
    """A registry with everything around it."""

    def __init__(self, folder: Path, timeout_s: float = 10.0, **limits: int) -> None:
        self.store = Store(folder / "store")
        self.store.folder.mkdir()
        self.fetcher = FolderFetcher(self.store, folder / "content")
        self.loader = PickleLoader()
        self.told = Told()
        self.source = ModelSource("python", dir=str(self.store.folder), **limits)  # type: ignore[arg-type]
        self.timeout_s = timeout_s
        self._registry: Registry[Any] | None = None
        self._making = threading.Lock()

    @property
    def registry(self) -> Registry[Any]:
        """The registry, made with what is in the store when it is first asked for."""
        with self._making:
            if self._registry is None:
                around = self.loader, self.fetcher, self.told
                self._registry = Registry(self.source, self.listed(), *around, self.timeout_s)
            return self._registry

    def listed(self) -> Catalogue:
        return self.store.catalogue(has_paths=not self.source.is_cached)

    def update(self) -> None:
        self.registry.update(self.listed())

    def loaded(self) -> dict[str, list[str]]:
        return {name: found["loaded"] for name, found in self.registry.describe().items() if found["loaded"]}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., Bench]:
    return lambda *models, **limits: _with_models(Bench(tmp_path, **limits), models)


def _with_models(bench: Bench, models: tuple[str, ...]) -> Bench:
    for model in models:
        bench.store.add(model)
    return bench


def in_threads(number: int, work: Callable[[], Any]) -> list[Any]:
    """Run the same at the same time; exceptions are returned."""
    barrier = threading.Barrier(number)

    def one() -> Any:
        barrier.wait()
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(number) as pool:
        return [future.result() for future in [pool.submit(one) for _ in range(number)]]


class TestWithoutCaching:
    def test_the_latest_of_every_model_is_loaded_before_serving(self, bench: Bench) -> None:
        bench.store.add("a", "9")
        bench.store.add("a", "10")
        bench.store.add("b", "1")
        bench.registry.load_latest()
        assert bench.loaded() == {"a": ["10"], "b": ["1"]}
        assert bench.registry.get("a")["number"] == "10"
        assert bench.told.loading_ == [("a", "10"), ("b", "1")]
        assert bench.told.sets[-1] == [("a", "10"), ("b", "1")]
        assert not bench.fetcher.fetched

    def test_versions_asked_for_are_loaded_too_where_they_still_exist(self, bench: Bench) -> None:
        bench.store.add("a", "1")
        bench.store.add("a", "2")
        bench.registry.load_latest(also=[("a", "1"), ("a", "7"), ("x", "1")])
        assert bench.loaded() == {"a": ["1", "2"]}

    def test_other_versions_are_loaded_once_at_first_use_and_stay(self, bench: Bench) -> None:
        bench.store.add("a", "1")
        bench.store.add("a", "2")
        bench.registry.load_latest()
        found = in_threads(20, lambda: bench.registry.get("a", "1"))
        assert bench.loader.loads["a"] == 2
        assert all(model is found[0] for model in found)
        assert bench.registry.get("a", "1") is found[0]

    def test_names_asked_for_take_no_memory_where_any_name_means_the_one_model(self, bench: Bench) -> None:
        bench.store.add(DEFAULT_MODEL)
        bench.source = ModelSource("python", (ModelPath(DEFAULT_MODEL, str(bench.store.folder)),))
        bench.registry.load_latest()
        assert bench.registry.get("first") is bench.registry.get() is bench.registry.get({})  # type: ignore[arg-type]
        tracemalloc.start()
        try:
            for number in range(200):
                bench.registry.get(f"{number}" * 5000)
            assert tracemalloc.get_traced_memory()[0] < MIB
        finally:
            tracemalloc.stop()

    def test_a_model_that_does_not_load_is_named_with_the_cause(self, bench: Bench) -> None:
        bench.store.add("a")
        bench.store.add_raw("b", b"no pickle")
        with pytest.raises(ModelError, match=r"failed \(re-\)loading model b of version 1: UnpicklingError") as raised:
            bench.registry.load_latest()
        assert type(raised.value.__cause__).__name__ == "UnpicklingError"
        assert bench.told.failures[0][:2] == ("b", "1")

    def test_what_is_unchanged_stays_and_what_is_gone_is_dropped_once_unused(self, bench: Bench) -> None:
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
        assert bench.told.sets[-1] == [("a", "1")]

    def test_a_loaded_version_with_new_content_is_served_as_it_was_loaded(self, bench: Bench) -> None:
        bench.store.add("a", mark="old")
        bench.registry.load_latest()
        bench.store.add("a", mark="new")
        bench.update()
        assert bench.registry.get("a")["mark"] == "old"
        assert bench.loader.loads["a"] == 1

    def test_a_new_latest_version_is_loaded_when_asked_for(self, bench: Bench) -> None:
        bench.store.add("a", "9")
        bench.registry.load_latest()
        assert bench.registry.get("a")["number"] == "9"
        bench.store.add("a", "10")
        bench.update()
        assert bench.registry.get("a")["number"] == "10"

    def test_names_without_end_for_the_one_model_of_path_are_not_remembered(self, bench: Bench) -> None:
        bench.store.add(DEFAULT_MODEL)
        bench.source = ModelSource("python", paths=(ModelPath(DEFAULT_MODEL, "/iris"),))
        bench.registry.load_latest()
        bench.registry.get("first")
        gc.collect()
        before = sys.getallocatedblocks()
        for number in range(5000):
            assert bench.registry.get(f"name {number}")["name"] == DEFAULT_MODEL
        gc.collect()
        assert sys.getallocatedblocks() - before < 1000

    def test_versions_and_times_are_described(self, bench: Bench) -> None:
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
    def test_many_calls_share_one_attempt_and_its_error(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=2)
        bench.store.add_raw("a", b"no pickle")
        errors = in_threads(50, lambda: bench.registry.get("a"))
        assert bench.loader.loads["a"] == 1
        assert len({str(error) for error in errors}) == 1
        assert all(type(error) is ModelError for error in errors)
        assert len(bench.told.failures) == 1

    def test_the_users_traceback_goes_with_the_error(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)

        def fail(request: LoadRequest) -> None:
            raise UserError("ValueError: bad weights", 'File "handler.py", line 3, in load_model')

        bench.loader.before = fail
        with pytest.raises(ModelError) as raised:
            bench.registry.get("a")
        assert str(raised.value) == "failed (re-)loading model a of version 1: ValueError: bad weights"
        assert raised.value.traceback == 'File "handler.py", line 3, in load_model'
        assert isinstance(raised.value.__cause__, UserError)
        assert bench.told.failures[0][3] == raised.value.traceback

    def test_it_is_tried_again_after_a_while(
        self, cached: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(failures, "FIRST_RETRY_S", 0.05)
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

    def test_other_content_is_tried_at_once(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=1)
        bench.store.add_raw("a", b"no pickle")
        with pytest.raises(ModelError):
            bench.registry.get("a")
        bench.store.add("a")
        bench.update()
        assert bench.registry.get("a")["name"] == "a"

    def test_a_failure_does_not_keep_what_was_half_loaded(self, cached: Callable[..., Bench]) -> None:
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


class TestCaching:
    def test_nothing_is_loaded_before_it_is_asked_for(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.registry.load_latest(also=[("a", "1")])
        assert not bench.loader.loads

    def test_a_hundred_first_calls_fetch_and_load_once(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)
        found = in_threads(100, lambda: bench.registry.get("a"))
        assert bench.fetcher.fetched["a"] == bench.loader.loads["a"] == 1
        assert all(model is found[0] for model in found)
        assert sum(bench.fetcher.released.values()) == 1

    def test_the_least_recently_used_goes_before_the_next_is_loaded(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", "c", cache_size=2)
        for name in ("a", "b", "a", "c"):
            bench.registry.get(name)
        assert bench.loaded() == {"a": ["1"], "c": ["1"]}
        assert bench.loader.most == 2

    def test_versions_count_each(self, cached: Callable[..., Bench]) -> None:
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

    def test_a_model_in_use_is_waited_for(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)
        with ThreadPoolExecutor(1) as pool:
            with call_scope():
                model = bench.registry.get("a")
                other = pool.submit(bench.registry.get, "b")
                wait_until(lambda: bench.fetcher.fetched["b"])
                assert bench.loader.is_live(model)
                assert not other.done()
            assert other.result(10)["name"] == "b"
        assert not bench.loader.is_live(model)

    def test_a_waiter_gives_up_with_what_is_in_use(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1, timeout_s=0)
        with call_scope(), ThreadPoolExecutor(1) as pool:
            bench.registry.get("a")
            error = pool.submit(bench.registry.get, "b").exception(10)
        assert str(error) == (
            "there is no room to load model b of version 1 within cache_size: 1; in use: a of version 1; "
            "raise the limit, or let fewer requests run at the same time"
        )
        assert not bench.told.failures
        assert bench.registry.get("b")["name"] == "b"

    def test_a_call_that_needs_two_models_where_one_fits_lets_go_of_its_first(
        self, cached: Callable[..., Bench]
    ) -> None:
        bench = cached("a", "b", cache_size=1)
        with call_scope():
            first = bench.registry.get("a")
            assert bench.registry.get("b")["name"] == "b"
            assert first["name"] == "a"
        assert bench.loader.most == 1

    def test_calls_that_hold_what_the_other_needs_do_not_wait_for_each_other(
        self, cached: Callable[..., Bench]
    ) -> None:
        bench = cached("a", "b", "c", cache_size=2)
        barrier = threading.Barrier(2)

        def predict(first: str, second: str) -> str:
            with call_scope():
                bench.registry.get(first)
                barrier.wait()
                bench.registry.get("c" if second == "a" else "a")
                return str(bench.registry.get(second)["name"])

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(predict, "a", "b"), pool.submit(predict, "b", "a")]
            assert [future.result(10) for future in futures] == ["b", "a"]
        assert bench.loader.most == 2

    def test_coroutines_that_a_blocked_loop_can_not_run_are_not_waited_for(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)

        async def main() -> str:
            going = asyncio.Event()

            async def predict(name: str) -> str:
                model = bench.registry.get(name)
                if name == "a":
                    await going.wait()
                return str(model["name"])

            first = asyncio.create_task(in_scope(predict)("a"))
            await asyncio.sleep(0)
            second = await in_scope(predict)("b")
            going.set()
            return await first + second

        assert asyncio.run(asyncio.wait_for(main(), 5)) == "ab"

    def test_loading_a_model_may_get_another(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.loader.before = lambda request: request.model == "a" and bench.registry.get("b")
        assert bench.registry.get("a")["name"] == "a"
        assert bench.loaded() == {"a": ["1"], "b": ["1"]}

    def test_loading_a_model_may_get_one_that_another_thread_is_about_to_load(
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
            assert futures[0].result(10)["name"] == "b"

    def test_a_thread_may_ask_for_what_waited_for_it_a_moment_ago(self, cached: Callable[..., Bench]) -> None:
        for _ in range(20):
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
                assert bench.registry.get("a") is futures[0].result(10)
            shutil.rmtree(bench.store.folder.parent)
            bench.store.folder.parent.mkdir()

    def test_a_model_that_needs_itself_is_an_error(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.loader.before = lambda request: bench.registry.get("b" if request.model == "a" else "a")
        with pytest.raises(ModelError, match="model a of version 1 is asked for by what loads it"):
            bench.registry.get("a")

    def test_a_model_that_needs_another_where_one_fits_is_an_error_at_once(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)
        bench.loader.before = lambda request: request.model == "a" and bench.registry.get("b")
        with pytest.raises(ModelError, match="another model, which loads it, takes all of it"):
            bench.registry.get("a")

    def test_what_an_abandoned_result_held_can_go(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=1)

        @in_scope
        def predict() -> Any:
            name = bench.registry.get("a")["name"]
            return (name for _ in range(3))

        chunks = predict()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(bench.registry.get, "b")
            wait_until(lambda: bench.fetcher.fetched["b"])
            assert not other.done()
            del chunks
            assert other.result(10)["name"] == "b"


class TestUpdatesWithCaching:
    def test_a_new_version_is_loaded_beside_the_old_one_which_is_served_meanwhile(
        self, cached: Callable[..., Bench]
    ) -> None:
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

    def test_new_content_of_a_loaded_version_takes_its_place(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=2)
        with call_scope():
            old = bench.registry.get("a")
            bench.store.add("a", mark="new")
            bench.update()
            with ThreadPoolExecutor(1) as pool:
                wait_until(lambda: pool.submit(bench.registry.get, "a").result()["mark"] == "new")
            assert bench.loader.is_live(old)
        wait_until(lambda: not bench.loader.is_live(old))
        assert bench.told.sets[-1] == [("a", "1")]

    def test_where_both_do_not_fit_the_old_one_goes_once_unused(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=1)
        with call_scope():
            bench.registry.get("a")
            bench.store.add("a", mark="new")
            bench.update()
            wait_until(lambda: bench.fetcher.fetched["a"] == 2)
            assert bench.registry.get("a")["mark"] is None
        wait_until(lambda: bench.registry.get("a")["mark"] == "new")
        assert bench.loader.most == 1

    def test_calls_that_come_and_go_do_not_keep_the_old_one_for_ever(
        self, cached: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(room, "_PATIENCE_S", 0.0)
        bench = cached("a", cache_size=1)
        overlapping = [call_scope(), call_scope()]

        def begin(call: call_scope) -> Any:
            call.__enter__()
            return bench.registry.get("a")["mark"]

        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            one.submit(begin, overlapping[0]).result(10)
            bench.store.add("a", mark="new")
            bench.update()
            wait_until(lambda: not bench.loaded())
            later = other.submit(begin, overlapping[1])
            assert bench.loader.loads["a"] == 1
            one.submit(overlapping[0].__exit__, None, None, None).result(10)
            assert later.result(10) == "new"
            other.submit(overlapping[1].__exit__, None, None, None).result(10)

    def test_another_model_goes_rather_than_the_old_version(self, cached: Callable[..., Bench]) -> None:
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

    def test_a_version_that_does_not_load_leaves_the_old_one_in_place(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_size=2)
        bench.store.add("a", "1")
        bench.registry.get("a")
        bench.store.add_raw("a", b"no pickle", "2")
        bench.update()
        wait_until(lambda: bench.told.failures)
        assert bench.told.failures[0][:2] == ("a", "2")
        assert bench.registry.get("a")["number"] == "1"
        bench.store.add("a", "2")
        bench.update()
        wait_until(lambda: bench.registry.get("a")["number"] == "2")

    def test_a_background_load_that_failed_is_tried_again(
        self, cached: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(failures, "FIRST_RETRY_S", 0.05)
        bench = cached("a", cache_size=2)
        bench.registry.get("a")

        def fail_once(request: LoadRequest) -> None:
            if bench.loader.loads["a"] == 2:
                raise OSError("for a moment")

        bench.loader.before = fail_once
        bench.store.add("a", mark="new")
        bench.update()
        wait_until(lambda: bench.registry.get("a")["mark"] == "new")
        assert len(bench.told.failures) == 1

    def test_when_the_latest_is_deleted_the_one_below_takes_over(self, cached: Callable[..., Bench]) -> None:
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

    def test_models_that_are_gone_are_unloaded_once_unused(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        with call_scope():
            model = bench.registry.get("a")
            bench.store.remove("a")
            bench.update()
            with pytest.raises(ModelError, match="'a' model wasn't found"):
                bench.registry.get("a")
            assert bench.loader.is_live(model)
        wait_until(lambda: not bench.loader.live)
        assert bench.told.sets[-1] == []

    def test_models_that_are_not_loaded_are_not_loaded_by_an_update(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)
        bench.registry.get("a")
        bench.store.add("b", "2")
        bench.update()
        assert bench.registry.get("b")["number"] == "2"
        assert bench.loader.loads == {"a": 1, "b": 1}

    def test_a_model_removed_while_it_is_loaded_does_not_stay(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", "b", cache_size=2)

        def remove(request: LoadRequest) -> None:
            bench.store.remove("a")
            bench.update()

        bench.loader.before = remove
        assert bench.registry.get("a")["name"] == "a"
        wait_until(lambda: not bench.loader.live)

    def test_content_replaced_while_it_is_loaded_is_loaded_again(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_size=2)

        def replace(request: LoadRequest) -> None:
            bench.loader.before = lambda request: None
            bench.store.add("a", mark="new")
            bench.update()

        bench.loader.before = replace
        bench.registry.get("a")
        wait_until(lambda: bench.registry.get("a")["mark"] == "new")


class TestMemoryBudget:
    def test_models_go_for_the_bytes_of_the_next(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_memory_bytes=100 * MIB)
        for number in range(8):
            bench.store.add(f"m{number}", size_bytes=20 * MIB)
        for number in range(8):
            assert bench.registry.get(f"m{number}")["weights"].nbytes == 20 * MIB
        assert 3 <= len(bench.loader.live) <= 4
        assert bench.loader.most <= 5
        assert "m7" in bench.loaded()

    def test_files_above_the_budget_are_refused_before_they_are_fetched(self, cached: Callable[..., Bench]) -> None:
        bench = cached("a", cache_memory_bytes=16 * MIB)
        bench.store.add("big", size_bytes=20 * MIB)
        bench.registry.get("a")
        with pytest.raises(ModelError) as raised:
            bench.registry.get("big")
        assert str(raised.value) == (
            "model big of version 1 has files of 20Mi, more than cache_memory: 16Mi; set cache_memory above that"
        )
        assert not bench.fetcher.fetched["big"]
        assert bench.loaded() == {"a": ["1"]}
        assert bench.told.failures[0][0] == "big"

    def test_a_model_that_grows_beyond_the_budget_in_memory_is_refused_and_unloaded(
        self, cached: Callable[..., Bench]
    ) -> None:
        bench = cached(cache_memory_bytes=40 * MIB)
        bench.store.add_raw("a", b"cbuiltins\nbytearray\n(I80000000\ntR.")  # 80 MB of 40 bytes
        bench.loader.before = lambda request: None
        load = bench.loader.load

        def load_and_touch(request: LoadRequest) -> Any:
            model = load(request)
            model[::4096] = b"x" * len(model[::4096])
            return model

        bench.loader.load = load_and_touch  # type: ignore[method-assign]
        with pytest.raises(ModelError, match="model a of version 1 takes 7.Mi, more than cache_memory: 40Mi"):
            bench.registry.get("a")
        assert not bench.loader.live
        with pytest.raises(ModelError, match="takes 7.Mi"):
            bench.registry.get("a")
        assert bench.loader.loads["a"] == 2  # once more, as libraries that are imported would be in memory by then

    def test_libraries_imported_with_the_first_model_are_no_part_of_it(self, cached: Callable[..., Bench]) -> None:
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

    def test_what_a_model_takes_is_remembered_when_it_was_unloaded(self, cached: Callable[..., Bench]) -> None:
        bench = cached(cache_memory_bytes=70 * MIB)
        for number in range(3):
            bench.store.add(f"m{number}", size_bytes=20 * MIB)
        for _ in range(3):
            for number in range(3):
                bench.registry.get(f"m{number}")
                assert sum(model["weights"].nbytes for model in bench.loader.live) <= 70 * MIB


def test_get_stays_fast_and_right_under_threads_and_updates(cached: Callable[..., Bench]) -> None:
    bench = cached("a", "b", "c", "d", cache_size=2)
    stop = threading.Event()

    @in_scope
    def predict(name: str) -> bool:
        model = bench.registry.get(name)
        return bool(model["name"] == name) and bench.loader.is_live(model)

    def work() -> int:
        done = 0
        while not stop.is_set() or done < 50:
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
        assert all(future.result(60) >= 50 for future in futures)
    assert bench.loader.most <= 2
    assert bench.loader.at_once == 1
    bench.registry.close()
