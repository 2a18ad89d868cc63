"""Invariants of the cache under any order of calls, updates and failures: limits hold, models in use stay loaded."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cortex.errors import ModelError
from cortex.models.loaded_models import call_scope
from cortex.models.registry import Registry
from cortex.models.spec import ModelSource
from harness.models.local_models import FolderFetcher, PickleLoader, RecordedEvents, Store

pytestmark = [pytest.mark.heavy, pytest.mark.long]

MODELS = ("a", "b", "c", "d")
NUMBERS = ("1", "2")
ACTORS = range(3)


class Actor:
    """A thread on which one call after the other runs."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.call: ExitStack | None = None
        self.holds: list[Any] = []

    def run(self, work: Callable[[], Any]) -> Any:
        return self.pool.submit(work).result(20)

    def begin(self) -> None:
        self.call = ExitStack()
        self.call.enter_context(call_scope())

    def end(self) -> None:
        self.holds.clear()
        if self.call is not None:
            self.call.close()
            self.call = None


class CacheMachine(RuleBasedStateMachine):
    """Calls on three threads, while models come, go, change and break."""

    @initialize(limit=st.integers(1, 3))
    def set_up(self, limit: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.limit = limit
        self.store = Store(self.folder / "store")
        for name in MODELS:
            self.store.add(name)
        self.loader = PickleLoader()
        self.unload = self.loader.unload
        self.loader.unload = self.check_unload  # type: ignore[method-assign]
        self.wrong: list[str] = []
        self.mark = 0
        source = ModelSource("python", dir="/store", cache_size=limit)
        fetcher = FolderFetcher(self.store, self.folder / "content")
        self.fetcher = fetcher
        self.registry: Registry[Any] = Registry(
            source, self.store.catalogue(), self.loader, fetcher, RecordedEvents(), room_timeout_s=0
        )
        self.actors = [Actor() for _ in ACTORS]
        self.asking: Actor | None = None

    def check_unload(self, model: Any) -> None:
        for actor in self.actors:
            if actor is not self.asking and any(held is model for held in actor.holds):
                self.wrong.append(f"unloaded {model['name']} in use")
        self.unload(model)

    @rule(number=st.sampled_from(ACTORS))
    def begin_call(self, number: int) -> None:
        actor = self.actors[number]
        if actor.call is None:
            actor.run(actor.begin)

    @rule(number=st.sampled_from(ACTORS))
    def end_call(self, number: int) -> None:
        actor = self.actors[number]
        actor.run(actor.end)

    @rule(number=st.sampled_from(ACTORS), name=st.sampled_from(MODELS), version=st.sampled_from(["latest", *NUMBERS]))
    def get(self, number: int, name: str, version: str) -> None:
        actor = self.actors[number]

        def ask() -> None:
            model = self.registry.get(name, version)
            if model["name"] != name or version not in ("latest", model["number"]):
                self.wrong.append(f"asked for {name} {version}, got {model['name']} {model['number']}")
            if actor.call is not None:
                actor.holds.append(model)

        self.asking = actor
        try:
            actor.run(ask)
        except ModelError:
            pass
        finally:
            self.asking = None

    @rule(name=st.sampled_from(MODELS))
    def get_at_once(self, name: str) -> None:
        before = self.loader.loads[name]
        barrier = threading.Barrier(4)

        def ask() -> Any:
            barrier.wait(60)
            try:
                return self.registry.get(name)
            except ModelError:
                return None

        with ThreadPoolExecutor(4) as pool:
            found = [future.result(20) for future in [pool.submit(ask) for _ in range(4)]]
        if all(found) and all(model is found[0] for model in found):
            assert self.loader.loads[name] <= before + 1 + self.changing(name)

    @rule(name=st.sampled_from(MODELS), number=st.sampled_from(NUMBERS), is_broken=st.booleans())
    def upload(self, name: str, number: str, is_broken: bool) -> None:
        self.mark += 1
        if is_broken:
            self.store.add_raw(name, b"broken %d" % self.mark, number)
        else:
            self.store.add(name, number, self.mark)
        self.registry.update(self.store.catalogue())

    @rule(name=st.sampled_from(MODELS), number=st.sampled_from(NUMBERS))
    def remove(self, name: str, number: str) -> None:
        if (self.store.folder / name / number).exists():
            self.store.remove(name, number)
            self.registry.update(self.store.catalogue())

    @invariant()
    def is_within_limits(self) -> None:
        if not hasattr(self, "loader"):
            return
        assert self.loader.most <= self.limit
        assert self.loader.at_once <= 1
        assert not self.wrong

    def changing(self, name: str) -> int:
        """Count what a background load may add: one for each version."""
        return len(NUMBERS) if self.mark else 0

    def teardown(self) -> None:
        if not hasattr(self, "loader"):
            return
        for actor in self.actors:
            actor.run(actor.end)
            actor.pool.shutdown()
        self.registry.close()
        assert not self.loader.live
        assert not self.wrong
        shutil.rmtree(self.folder)


TestCacheInvariants = CacheMachine.TestCase
TestCacheInvariants.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
