"""Parts of `model_cache` that run in a new process, and write their results to a file."""

from __future__ import annotations

import gc
import json
import pickle
import random
import sys
import threading
import time
from array import array
from bisect import bisect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

from cortex.models import memory_budget
from cortex.models.loaded_models import with_call_scope
from cortex.models.loader import LoadRequest, ModelLoader
from cortex.models.registry import Registry
from cortex.models.spec import Catalogue, Model, ModelSource, Version

THREADS = 4


class PickleLoader:
    """Loader like that of a typical user."""

    def load(self, request: LoadRequest) -> Any:
        with (Path(request.path) / "model.pkl").open("rb") as file:
            return pickle.load(file)  # noqa: S301 – ours

    def unload(self, model: Any) -> None:
        """Only drop references."""


class Here:
    """Source whose files are already on this machine; downloads are measured elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fetches = 0

    def fetch(self, model: str, version: Version) -> Path:
        self.fetches += 1
        return self._folder / model

    def release(self, version: Version) -> None:
        """Keep the files."""


class Counted:
    """Counts and times loads."""

    def __init__(self, loader: ModelLoader[Any]) -> None:
        self._loader = loader
        self.seconds = array("d")  # a list's floats would lie among the models' objects, and keep their pages

    def load(self, request: LoadRequest) -> Any:
        began = time.perf_counter()
        model = self._loader.load(request)
        self.seconds.append(time.perf_counter() - began)
        return model

    def unload(self, model: Any) -> None:
        self._loader.unload(model)


class Quiet:
    """Observer that raises failures and ignores the rest."""

    def loading(self, model: str, version: Version) -> None: ...

    def requested(self, model: str, version: Version) -> None: ...

    def loaded(self, versions: Sequence[tuple[str, Version]]) -> None: ...

    def failed(self, model: str, version: Version, message: str, detail: str) -> None:
        raise SystemExit(f"{message}\n{detail}")


def main() -> None:
    """Run the named part with JSON arguments, and write its results to the file named last."""
    part, arguments, file = sys.argv[1:]
    memory_budget.configure_allocator()
    found = {"zipf": zipf, "cycles": cycles}[part](**json.loads(arguments))
    Path(file).write_text(json.dumps(found))


def zipf(folder: str, models: int, gets: int, budget_bytes: int, exponent: float) -> dict[str, Any]:
    """Request models with popularities by Zipf's law; then release all."""
    import numpy  # noqa: F401 – is in memory before the baseline, as a user's module would have it

    catalogue = _catalogue(Path(folder), models)
    loader, fetcher = Counted(PickleLoader()), Here(Path(folder))
    source = ModelSource("python", dir=folder, cache_memory_bytes=budget_bytes)
    gc.collect()
    gc.freeze()
    memory_budget.trim_heap()
    baseline = memory_budget.resident_bytes()
    registry: Registry[Any] = Registry(source, catalogue, loader, fetcher, Quiet())
    hundred = _first_gets(registry, "m0")
    once = [len(loader.seconds), fetcher.fetches]
    weights = list(accumulate(1 / rank**exponent for rank in range(1, models + 1)))
    latencies, lock = array("d"), threading.Lock()

    @with_call_scope
    def predict(name: str) -> float:
        return float(registry.get(name)["weights"][0])

    def work(seed: int) -> None:
        chance = random.Random(seed)
        mine = array("d")
        for _ in range(gets // THREADS):
            name = f"m{bisect(weights, chance.random() * weights[-1])}"
            began = time.perf_counter()
            predict(name)
            mine.append(time.perf_counter() - began)
        with lock:
            latencies.extend(mine)

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(work, seed) for seed in range(THREADS)]:
            future.result()
    took_s = time.perf_counter() - began
    full, loaded = memory_budget.resident_bytes(), sum(len(each["loaded"]) for each in registry.describe().values())
    registry.update(Catalogue(()))
    _wait_until_empty(registry, loader)
    return {
        "baseline": baseline,
        "full": full,
        "after": memory_budget.resident_bytes(),
        "peak": memory_budget.peak_bytes(),
        "loads": len(loader.seconds),
        "gets": len(latencies),
        "loaded_at_end": loaded,
        "took_s": took_s,
        "load_p50_ms": _percentile(loader.seconds, 0.5) * 1e3,
        "get_p50_us": _percentile(latencies, 0.5) * 1e6,
        "get_p99_ms": _percentile(latencies, 0.99) * 1e3,
        "hundred": [*once, hundred],
    }


def cycles(folder: str, kind: str, cycles: int) -> dict[str, Any]:
    """Load and unload in turn two models that don't fit together; record the memory of the process."""
    loader = Counted(_loader(kind))
    source = ModelSource("python", dir=folder, cache_size=1)
    registry: Registry[Any] = Registry(source, _catalogue(Path(folder), 2), loader, Here(Path(folder)), Quiet())
    resident = []
    for number in range(cycles):
        registry.get(f"m{number % 2}")
        if number % (cycles // 20) == cycles // 20 - 1:
            resident.append(memory_budget.resident_bytes())
    full = registry.describe()
    registry.update(Catalogue(()))
    _wait_until_empty(registry, loader)
    return {
        "resident": resident,
        "loads": len(loader.seconds),
        "load_p50_ms": _percentile(loader.seconds, 0.5) * 1e3,
        "after": memory_budget.resident_bytes(),
        "loaded": sum(len(each["loaded"]) for each in full.values()),
    }


def _loader(kind: str) -> ModelLoader[Any]:
    if kind == "onnx":
        from cortex.predictor.clients.onnx import OnnxLoader

        return OnnxLoader(wants_gpu=False, threads=1)
    if kind == "tensorflow":
        from cortex.predictor.clients.embedded_tensorflow import EmbeddedTensorFlow

        return EmbeddedTensorFlow()
    return PickleLoader()


def _catalogue(folder: Path, models: int) -> Catalogue:
    found = []
    for number in range(models):
        name = f"m{number}"
        size_bytes = sum(path.stat().st_size for path in (folder / name).rglob("*") if path.is_file())
        found.append(Model(name, (Version("1", f"{name}digest", size_bytes, 0.0),)))
    return Catalogue(tuple(sorted(found, key=lambda model: model.name)))


def _first_gets(registry: Registry[Any], name: str) -> int:
    """Request an unloaded model on a hundred threads at once; return the number of distinct objects."""
    barrier = threading.Barrier(100)

    def ask(_: int) -> Any:
        barrier.wait()
        return registry.get(name)

    with ThreadPoolExecutor(100) as pool:
        return len({id(model) for model in pool.map(ask, range(100))})


def _wait_until_empty(registry: Registry[Any], loader: Counted) -> None:
    """Wait for the thread that unloads models."""
    deadline = time.monotonic() + 30
    registry.close()
    while any(thread.name == "cortex-model-renewals" for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            raise SystemExit("models are still there 30 s after they were removed")
        time.sleep(0.05)
    memory_budget.collect_and_trim()


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


if __name__ == "__main__":
    main()
