"""The memory budget of a process with cached models: measure and estimate model sizes, and evict to stay within limits.

Three parts: measuring and trimming this process's memory (with glibc; other C libraries only measure),
`SizeEstimator` (pure), and `MemoryBudget`, which makes room before each load.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic

from cortex.errors import ModelError, format_size
from cortex.models.loaded_models import CallHandle, LoadedModel, LoadedModels, T, choose_eviction, execution_context
from cortex.models.spec import ModelSource, Version

_MIB = 1024 * 1024

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_ARENA_MAX = -8  # <malloc.h>
#: glibc's default is eight heaps per core, each with free holes of its own. The other thresholds (M_MMAP_THRESHOLD,
#: M_TRIM_THRESHOLD) keep their defaults: fixed lower ones would return memory without `trim_heap`, but requests with
#: temporary arrays would take half as long again, as these would be mapped and unmapped each time.
ARENAS = 2
# Python 3.13 renamed the function.
_clear_type_cache: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


# The memory of this process.


def configure_allocator() -> bool:
    """Limit fragmentation by freed models; call it before threads start. Return False without glibc."""
    libc = _glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_ARENA_MAX, ARENAS))


def resident_bytes() -> int:
    """Return this process's resident memory, shared pages included."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 – on the path of every load; pathlib takes twice as long
            return int(file.read().split()[1]) * _PAGE_BYTES
    except FileNotFoundError:  # not Linux
        import psutil  # noqa: PLC0415 - only there

        return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return the peak of `resident_bytes`; 0 if the kernel does not report it."""
    try:
        lines = Path("/proc/self/status").read_bytes().splitlines()
    except FileNotFoundError:  # not Linux
        return 0
    for line in lines:
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def trim_heap() -> None:
    """Return free heap memory to the operating system; releases the GIL meanwhile."""
    # The type cache references attribute names that were looked up. Each unpickled model leaves a few such strings,
    # each of which keeps a whole arena of 1 MiB.
    _clear_type_cache()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def collect_and_trim(is_frozen: bool = False) -> None:
    """Collect garbage, then return free memory to the operating system.

    With `is_frozen` the garbage may date from before `gc.freeze()`, which exempts objects from collection: unfreeze,
    collect, and freeze again.
    """
    if is_frozen and gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    else:
        gc.collect()
    trim_heap()


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version  # musl has neither this nor the two functions used above
        _ = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        return None
    return libc


# Estimates of sizes.

#: From this size on, a model's memory is estimated in proportion to its files.
_LARGE_BYTES = 4 * _MIB
_HISTORY = 16
#: Estimates before the first load. A pickle that is read whole and then decoded takes twice its size at the peak.
_FIRST_RATIO, _FIRST_PEAK_RATIO = 1.25, 2.0
_CREDIBLE_RATIO, _MAX_RATIO = 0.5, 8.0
_FIRST_EXTRA_BYTES = _MIB
_MAX_EXTRA_BYTES = 32 * _MIB


@dataclass(frozen=True)
class SizeEstimate:
    """The estimated memory of one version."""

    loaded_bytes: int  #: while it is loaded
    peak_bytes: int  #: at most, while it is being loaded


class SizeEstimator:
    """Estimates the memory of a version from earlier loads of it, else from loads of other versions."""

    def __init__(self) -> None:
        self._measured: dict[str, int] = {}  #: by digest
        self._ratios: deque[float] = deque(maxlen=_HISTORY)
        self._peak_ratios: deque[float] = deque(maxlen=_HISTORY)
        self._extras: deque[int] = deque(maxlen=_HISTORY)
        self._least_ratio: float | None = None  #: the lowest credible ratio of memory to files, at most 1

    def measured(self, digest: str) -> int | None:
        """Return the memory that a content took when it was last loaded."""
        return self._measured.get(digest)

    def keep_only(self, digests: set[str]) -> None:
        """Drop the measurements of all other contents."""
        for digest in self._measured.keys() - digests:
            del self._measured[digest]

    def estimate(self, digest: str, files_bytes: int) -> SizeEstimate:
        """Return an upper estimate for a content."""
        extra = max(self._extras, default=_FIRST_EXTRA_BYTES)
        ratio = max(self._ratios, default=_FIRST_RATIO)
        peak_ratio = max(self._peak_ratios, default=_FIRST_PEAK_RATIO)
        loaded = self._measured.get(digest) or int(files_bytes * ratio) + extra
        return SizeEstimate(loaded, max(loaded, int(files_bytes * peak_ratio) + extra))

    def record(
        self, digest: str, files_bytes: int, grown_bytes: int, peak_bytes: int | None, has_clean_heap: bool = False
    ) -> int:
        """Record the load of a content and return its estimated memory from now on.

        `grown_bytes` is the growth of the process; it includes concurrent requests, so it may be any number.
        `peak_bytes` is its highest growth, None if unknown. With `has_clean_heap` no holes of unloaded models were
        filled: only then may a model be estimated below the size of its files.
        """
        ratio = grown_bytes / files_bytes if files_bytes else 1.0
        # Below half of the files, they are mapped and not read yet, or another thread freed memory.
        if has_clean_heap and files_bytes >= _LARGE_BYTES and ratio >= _CREDIBLE_RATIO:
            self._least_ratio = min(max(self._least_ratio or 0.0, ratio), 1.0)
        least = self._least_ratio or 1.0
        loaded = max(grown_bytes, int(files_bytes * least))
        self._measured[digest] = loaded
        if files_bytes >= _LARGE_BYTES:
            self._ratios.append(min(loaded / files_bytes, _MAX_RATIO))
            if peak_bytes is not None:
                self._peak_ratios.append(min(max(peak_bytes, loaded) / files_bytes, _MAX_RATIO))
        else:
            self._extras.append(min(loaded, _MAX_EXTRA_BYTES))
        return loaded


# The budget.

#: Interval at which a waiting thread releases the models of abandoned calls.
_SWEEP_S = 0.5
#: A newer version waits this long for its predecessor to be unused; after that, new calls have to wait.
_PATIENCE_S = 5.0
#: Tolerated excess of the process's own memory over the budget: requests take memory too.
_TOLERATED_SHARE, _TOLERATED_BYTES = 0.05, 8 * _MIB
#: Growth beyond this plus twice the model's files is not credible at the first load.
_CREDIBLE_BYTES = 32 * _MIB


class NoRoomError(ModelError):
    """A version can't be loaded now within the limits."""


class TooBigError(NoRoomError):
    """A version can never be loaded within the limits."""


class MemoryMeasurement:
    """The growth of the process since construction, without models that were loaded or unloaded meanwhile."""

    def __init__(
        self, estimator: SizeEstimator, version: Version, used: Callable[[], int], has_clean_heap: bool
    ) -> None:
        self._estimator = estimator
        self._version = version
        self._used = used
        self._has_clean_heap = has_clean_heap
        self._used_before = used()
        self._before = resident_bytes()
        self._peak_before = peak_bytes()

    def is_credible(self) -> bool:
        """Return whether one model can have caused the growth."""
        return self._grown() <= 2 * self._version.size_bytes + _CREDIBLE_BYTES

    def record(self) -> int:
        """Record the growth and return the estimated memory of the version."""
        grown, peak = self._grown(), peak_bytes()
        highest = peak - self._before if peak > self._peak_before else None
        version = self._version
        return self._estimator.record(version.digest, version.size_bytes, grown, highest, self._has_clean_heap)

    def _grown(self) -> int:
        trim_heap()
        return resident_bytes() - self._before - (self._used() - self._used_before)


class MemoryBudget(Generic[T]):
    """Enforces `cache_size` and `cache_memory`. Only the thread that holds the load lock may call it."""

    def __init__(
        self, source: ModelSource, loaded: LoadedModels[T], unload: Callable[[LoadedModel[T]], None], timeout_s: float
    ) -> None:
        self._count = source.cache_size
        self._budget = source.cache_memory_bytes
        self._is_limited = source.is_cached
        self._loaded = loaded
        self._unload_entry = unload
        self._timeout_s = timeout_s
        self._estimator = SizeEstimator()
        self._reserved: list[int] = []  #: by the loads in progress: loading a model may load another
        self._has_reloaded = False
        self._has_unloaded = False  #: new models then fill free holes and the process does not grow by their size
        self._baseline = 0  #: memory of the process without models

    @contextmanager
    def reserve(
        self, name: str, version: Version, handle: CallHandle | None, evict_last: LoadedModel[T] | None
    ) -> Iterator[Callable[[], MemoryMeasurement | None]]:
        """Reserve room for one version; yield a function that starts to measure, to be called just before loading.

        Evicts least recently used versions that no call uses. Raises: NoRoomError after the timeout, or at once if
        waiting can't help.
        """
        if not self._is_limited:
            yield lambda: None
            return
        self.check(name, version)
        peak_bytes = self._estimator.estimate(version.digest, version.size_bytes).peak_bytes
        # An estimate above the budget may be too high: only loading the model alone shows.
        need = peak_bytes if self._budget is None else min(peak_bytes, self._budget)
        self._make_room(need, name, version, handle, evict_last)
        try:
            self._evict_for_process_growth()
            yield lambda: MemoryMeasurement(self._estimator, version, self._used, not self._has_unloaded)
        finally:
            self._reserved.pop()

    def record(self, measurement: MemoryMeasurement | None) -> int:
        """Record a load and return the estimated memory of the version in bytes."""
        if measurement is None:
            return 0
        self._reserved[-1] = measurement.record()
        return self._reserved[-1]

    def needs_reload(self, measurement: MemoryMeasurement | None) -> bool:
        """Return whether to load the first version again to measure it.

        The first load of a process often imports libraries as well; they stay loaded and don't belong to the model.
        """
        if self._has_reloaded or self._budget is None or measurement is None or measurement.is_credible():
            return False
        self._has_reloaded = True
        return True

    def reset_baseline(self) -> None:
        """Count all memory that is used now as the process's own, except for loaded models."""
        self._baseline = resident_bytes() - self._used()

    def keep_only(self, digests: set[str]) -> None:
        """Drop the measurements of all other contents."""
        self._estimator.keep_only(digests)

    def check(self, name: str, version: Version) -> None:
        """Reject a version that is larger than the budget. Raises: TooBigError."""
        if self._budget is None:
            return
        measured = self._estimator.measured(version.digest)
        taken = version.size_bytes if measured is None else measured
        if taken > self._budget:
            what = "has files of" if measured is None else "takes"
            raise TooBigError(
                f"model {name} of version {version.number} {what} {format_size(taken)}, more than cache_memory: "
                f"{format_size(self._budget)}; set cache_memory above that"
            )

    def evict_excess(self) -> None:
        """Evict unused versions after a model took more memory than estimated."""
        while self._budget is not None and self._used() > self._budget:
            if not self._evict_unused():
                return

    def _make_room(
        self, need: int, name: str, version: Version, handle: CallHandle | None, evict_last: LoadedModel[T] | None
    ) -> None:
        began = time.monotonic()
        context = execution_context()
        loaded = self._loaded
        while True:
            with loaded.changed:
                loaded.release_abandoned()
                if self._fits(need):
                    if not loaded.all and not self._reserved:
                        self._baseline = resident_bytes()
                    self._reserved.append(need)
                    return
                victim, may_wait = choose_eviction(loaded.all, handle, context, evict_last)
                if victim is not None:
                    loaded.remove(victim)
                elif not may_wait or time.monotonic() - began > self._timeout_s:
                    raise self._no_room(name, version)
                else:
                    if evict_last is not None and time.monotonic() - began > _PATIENCE_S:
                        loaded.retire(evict_last.key)  # overlapping calls could keep it loaded for ever
                    loaded.changed.wait(_SWEEP_S)
            if victim is not None:
                self._unload(victim)
                del victim

    def _fits(self, need: int) -> bool:
        if self._count is not None and len(self._loaded.all) + len(self._reserved) >= self._count:
            return False
        return self._budget is None or self._used() + sum(self._reserved) + need <= self._budget

    def _used(self) -> int:
        return sum(entry.size_bytes for entry in self._loaded.all)

    def _evict_for_process_growth(self) -> None:
        """Evict while the process's real memory is above the limit: models may have grown since they were measured."""
        if self._budget is None:
            return
        tolerated = int(self._budget * _TOLERATED_SHARE) + _TOLERATED_BYTES
        limit = self._baseline + self._budget - sum(self._reserved) + tolerated
        if resident_bytes() <= limit:
            return
        trim_heap()
        # Keep at least half of the budget for models: the rest of the process may have grown for good.
        while resident_bytes() > limit and self._used() + sum(self._reserved) > self._budget / 2:
            if not self._evict_unused():
                return

    def _evict_unused(self) -> bool:
        """Evict the least recently used version that no call uses; return False if there is none."""
        with self._loaded.changed:
            self._loaded.release_abandoned()
            unused = next((entry for entry in self._loaded.all if not entry.handles), None)
            if unused is None:
                return False
            self._loaded.remove(unused)
        self._unload(unused)
        return True

    def _unload(self, victim: LoadedModel[T]) -> None:
        self._has_unloaded = True
        self._unload_entry(victim)

    def _no_room(self, name: str, version: Version) -> NoRoomError:
        used = sorted({f"{entry.model} of version {entry.version.number}" for entry in self._loaded.all})
        limits = []
        if self._count is not None:
            limits.append(f"cache_size: {self._count}")
        if self._budget is not None:
            limits.append(f"cache_memory: {format_size(self._budget)}")
        in_use = f"in use: {', '.join(used)}" if used else "another model, which loads this one, uses all of it"
        return NoRoomError(
            f"there is no room to load model {name} of version {version.number} within {', '.join(limits)}; "
            f"{in_use}; raise the limit, or allow fewer concurrent requests"
        )
