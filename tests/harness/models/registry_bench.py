"""A registry for tests with its store, fetcher, loader and recorded events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cortex.models.registry import Registry
from cortex.models.spec import Catalogue, ModelSource
from harness.models.local_models import FolderFetcher, PickleLoader, RecordedEvents, Store
from harness.wait import PATIENCE_S


class Bench:
    """A registry with everything around it."""

    def __init__(self, folder: Path, timeout_s: float = 10.0, **limits: int) -> None:
        self.store = Store(folder / "store")
        self.store.folder.mkdir()
        self.fetcher = FolderFetcher(self.store, folder / "content")
        self.loader = PickleLoader()
        self.events = RecordedEvents()
        self.source = ModelSource("python", dir=str(self.store.folder), **limits)  # type: ignore[arg-type]
        self.timeout_s = timeout_s
        self._registry: Registry[Any] | None = None
        self._making = threading.Lock()

    @property
    def registry(self) -> Registry[Any]:
        """The registry, created at first use with the models then in the store."""
        with self._making:
            if self._registry is None:
                around = self.loader, self.fetcher, self.events
                self._registry = Registry(self.source, self.listed(), *around, self.timeout_s)
            return self._registry

    def listed(self) -> Catalogue:
        return self.store.catalogue(has_paths=not self.source.is_cached)

    def update(self) -> None:
        self.registry.update(self.listed())

    def loaded(self) -> dict[str, list[str]]:
        return {name: found["loaded"] for name, found in self.registry.describe().items() if found["loaded"]}


def with_models(bench: Bench, models: tuple[str, ...]) -> Bench:
    for model in models:
        bench.store.add(model)
    return bench


def in_threads(number: int, work: Callable[[], Any]) -> list[Any]:
    """Run the same function in parallel; return exceptions."""
    barrier = threading.Barrier(number)

    def one() -> Any:
        barrier.wait(PATIENCE_S)
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(number) as pool:
        return [future.result() for future in [pool.submit(one) for _ in range(number)]]
