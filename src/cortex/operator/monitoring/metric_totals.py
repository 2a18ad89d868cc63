"""Totals of each API's metrics, over its running replicas and all that have ended.

Each replica has a folder of metrics named by its id. When the replica has ended, its numbers are added to the stored
totals and the folder is deleted; until then, the stored id keeps them from being counted twice. A replica of a deleted
API may end after a new API has taken the name: the revision in its id tells them apart.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cortex.state.queries.metrics import MetricStore
from cortex.telemetry import Logger
from cortex.worker.monitoring.metrics import COPIES_FOLDER, SeriesKind, merge_series, parse_key, read_folder

#: Maximum of stored series per API; newer ones are dropped.
MAX_SERIES = 20_000


class MetricTotals:
    """Thread-safe totals by API.

    `before_removal` (api, folder) is called before the folder of an ended replica is deleted, to save what else is in
    it; it is called again if storing the totals failed.
    """

    def __init__(
        self, folder: Path, store: MetricStore, logger: Logger, before_removal: Callable[[str, Path], None]
    ) -> None:
        self._folder = folder
        self._store = store
        self._logger = logger
        self._before_removal = before_removal
        self._lock = threading.Lock()

    def startup(self, running: Collection[str]) -> None:
        """Add the numbers of all replicas except those `running` (ids): they ended while no operator ran."""
        for name in self._names():
            if name not in running:
                self._end(name)

    def end(self, folder: Path) -> None:
        """Add the numbers of an ended replica and delete its folder. Idempotent."""
        self._end(folder.name)

    def of(self, api: str, without: str = "") -> dict[str, float]:
        """Return an API's numbers by the keys of `worker.monitoring.metrics`; counters never decrease.

        `without` is a revision whose running replicas are left out.
        """
        with self._lock:
            folded = self._store.folded()
            names = [name for name in self._names_of(api) if name not in folded]
            if without:
                names = [name for name in names if not without.startswith(_parse_id(name)[1])]
            return merge_series([self._store.totals(api), *(read_folder(self._folder / name) for name in names)])

    def of_revision(self, api: str, revision: str) -> dict[str, dict[str, float]]:
        """Return the numbers of the running replicas of one revision, by the id of the replica. Copies count."""
        return {
            name: merge_series([read_folder(self._folder / name), read_folder(self._folder / name / COPIES_FOLDER)])
            for name in self._names()
            if (parsed := _parse_id(name))[0] == api and revision.startswith(parsed[1])
        }

    def ring_files(self, api: str, revision: str, folder: str) -> list[Path]:
        """Return the rings of the running replicas of one revision in a folder of metrics; with those of copies."""
        return [
            path
            for name in self._names()
            if (parsed := _parse_id(name))[0] == api and revision.startswith(parsed[1])
            for requests in (self._folder / name, self._folder / name / COPIES_FOLDER)
            for path in sorted((requests / folder).glob("[!.]*"))  # not what the metrics mirror is writing
        ]

    def folders(self, api: str) -> list[Path]:
        """Return the folders of the API's replicas that have not ended."""
        return [self._folder / name for name in self._names_of(api)]

    def _end(self, name: str) -> None:
        folder = self._folder / name
        if not folder.is_dir():
            return
        try:
            api, revision = _parse_id(name)
            if revision in self._store.revision_prefixes(api):
                self._before_removal(api, folder)
            with self._lock:
                gone = self._store.folded() - set(self._names())
                self._store.fold(api, revision, name, read_folder(folder), _combine, gone)
        except Exception as error:  # of any kind: the replica has ended, and the next start retries
            self._logger.error("metrics of an ended replica can't be stored", exc_info=error, replica=name)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def _names_of(self, api: str) -> list[str]:
        names = [(name, parsed) for name in self._names() if (parsed := _parse_id(name))[0] == api]
        revisions = self._store.revision_prefixes(api) if names else ()
        return [name for name, (_, revision) in names if revision in revisions]

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._folder))  # noqa: PTH208 - names only
        except OSError:
            return []


def _parse_id(replica: str) -> tuple[str, str]:
    """Return the API and the revision prefix in a replica's id."""
    api, revision, _ = [*replica.rsplit("-", 2), "", ""][:3]
    return api, revision


def _combine(totals: Mapping[str, float], numbers: Mapping[str, float]) -> dict[str, float]:
    merged = ((key, _storable(key, value)) for key, value in merge_series([totals, numbers]).items())
    combined = {key: value for key, value in merged if value is not None}
    if len(combined) <= MAX_SERIES:
        return combined
    free = MAX_SERIES - len(totals)
    kept = {*totals, *[key for key in combined if key not in totals][: max(free, 0)]}
    return {key: value for key, value in combined.items() if key in kept}


def _storable(key: str, value: float) -> float | None:
    """Return the value, or a substitute for NaN, which databases can't store."""
    if not math.isnan(value):
        return value
    series = parse_key(key)
    # Opposite infinities were added. Dropping the total would make it look like one that starts at zero.
    return math.inf if series and series.kind in (SeriesKind.COUNTER, SeriesKind.SUM) else None
