"""Metrics of a supervisor: deaths, responses on behalf of dead processes, model reloads."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cortex.lifecycle import DeathCause
from cortex.replica.metrics import SUPERVISOR, MetricFile, SeriesKind, compact_ended, series_key


class SupervisorMetrics:
    """Counters in the supervisor's own file in `folder`. If the file can't be written, nothing is counted."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: MetricFile | None = None

    def startup(self) -> None:
        """Open the file."""
        if self._folder:
            with contextlib.suppress(OSError):  # requests are served without metrics
                self._file = MetricFile(Path(self._folder) / SUPERVISOR)

    def died(self, cause: DeathCause) -> None:
        """Count a process that ended without being stopped."""
        self._count("cortex_process_deaths_total", cause=cause.value)

    def answered(self, status: int) -> None:
        """Count a response sent on behalf of a process that died or does not exist."""
        self._count("cortex_replica_requests_total", code=str(status))

    def reloaded(self) -> None:
        """Count a process that took over with newer models."""
        self._count("cortex_model_reloads_total")

    def gather(self) -> None:
        """Merge the files of ended processes, so that their number stays bounded."""
        if self._folder:
            with contextlib.suppress(OSError, ValueError):  # repeated after the next death
                compact_ended(Path(self._folder))

    def _count(self, name: str, **labels: str) -> None:
        if self._file is not None:
            index = self._file.index_of(series_key(SeriesKind.COUNTER, name, labels))
            if index is not None:
                self._file.cells[index] += 1
