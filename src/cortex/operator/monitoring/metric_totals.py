"""The numbers of each API: of what runs, and of all that ended. Knows nothing of what is counted.

A replica's numbers lie in a folder named by its id. Once it has ended they are added to the stored totals, and the
folder goes; until it is gone, the stored id keeps them from being counted twice. Replicas of an API that was deleted
may end when another has its name: the revision in their ids tells.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cortex.replica.metric_folder import read_folder
from cortex.replica.series import SeriesKind, merge, parse_key
from cortex.replica.spec import ReplicaSpec
from cortex.state.metrics import MetricStore
from cortex.telemetry import Logger

#: Series of one API that are kept of replicas that ended; those beyond are dropped, the newest first.
MAX_SERIES = 20_000


class MetricTotals:
    """Adds up the numbers of each API. Any thread may call it."""

    def __init__(self, folder: Path, store: MetricStore, logger: Logger) -> None:
        #: Called with (api, folder) before the folder of a replica that ended goes, for what is not numbers; a second
        #: time if storing failed.
        self.before_removal: list[Callable[[str, Path], None]] = []
        self._folder = folder
        self._store = store
        self._logger = logger
        self._lock = threading.Lock()

    def startup(self, present: Collection[str]) -> None:
        """Add what replicas left that are not `present` (ids): they ended while no operator ran."""
        for name in self._names():
            if name not in present:
                self._end(name)

    def end(self, spec: ReplicaSpec) -> None:
        """Add what a replica counted that has ended, and remove its folder. Repeating it changes nothing."""
        if spec.metrics_dir:
            self._end(Path(spec.metrics_dir).name)

    def of(self, api: str) -> dict[str, float]:
        """Return an API's numbers by the keys of `replica.series`; counters never go back."""
        with self._lock:
            folded = self._store.folded()
            names = [name for name in self._names_of(api) if name not in folded]
            return merge([self._store.totals(api), *(read_folder(self._folder / name) for name in names)])

    def folders(self, api: str) -> list[Path]:
        """Return the folders of the API's replicas that have not ended."""
        return [self._folder / name for name in self._names_of(api)]

    def _end(self, name: str) -> None:
        folder = self._folder / name
        if not folder.is_dir():
            return
        try:
            api, revision = _origin(name)
            if revision in self._store.revision_prefixes(api):
                for call in self.before_removal:
                    call(api, folder)
            with self._lock:
                gone = self._store.folded() - set(self._names())
                self._store.fold(api, revision, name, read_folder(folder), _combine, gone)
        except Exception as error:  # the replica is gone in any case; the next start tries again
            self._logger.error("numbers of a replica can't be stored", exc_info=error, replica=name)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def _names_of(self, api: str) -> list[str]:
        names = [(name, origin) for name in self._names() if (origin := _origin(name))[0] == api]
        revisions = self._store.revision_prefixes(api) if names else ()
        return [name for name, (_, revision) in names if revision in revisions]

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._folder))  # noqa: PTH208 - names only
        except OSError:
            return []


def _origin(replica: str) -> tuple[str, str]:
    """Take the API, and how its revision begins, out of a replica's id."""
    api, revision, _ = [*replica.rsplit("-", 2), "", ""][:3]
    return api, revision


def _combine(totals: Mapping[str, float], numbers: Mapping[str, float]) -> dict[str, float]:
    merged = ((key, _storable(key, value)) for key, value in merge([totals, numbers]).items())
    combined = {key: value for key, value in merged if value is not None}
    if len(combined) <= MAX_SERIES:
        return combined
    room = MAX_SERIES - len(totals)
    kept = {*totals, *[key for key in combined if key not in totals][: max(room, 0)]}
    return {key: value for key, value in combined.items() if key in kept}


def _storable(key: str, value: float) -> float | None:
    """Return the value, or what stands for one that is no number, which no database has a value for."""
    if not math.isnan(value):
        return value
    series = parse_key(key)
    # Infinities were added: a sum that began anew would pass for the sum of all.
    return math.inf if series and series.kind in (SeriesKind.COUNTER, SeriesKind.SUM) else None
