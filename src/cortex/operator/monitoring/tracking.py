"""Tracking of predictions: drift detection, and feedback about the predictions of running and ended replicas."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from cortex.config.schema import TrackerConfig
from cortex.errors import InputError
from cortex.home import Home
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.monitoring import drift
from cortex.operator.monitoring.feedback import Truths, as_text, score
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.monitoring.prediction_summary import categories, describe_drift, describe_truth, summarize
from cortex.payloads.json_object import Json
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.state.queries.predictions import PredictionStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.monitoring.tracker import (
    CLASSIFICATION,
    PREDICTIONS_FOLDER,
    PredictionKind,
    copy_predictions,
    find_predictions,
)

#: Interval of drift detection.
UPDATE_S = 5.0
#: Prediction files kept per API of ended replicas, the newest ones.
KEPT_FILES = 32
#: Maximum age of feedback, as in the original.
KEPT_HOURS = 14 * 24
_CLEAN_S = 600.0
_SHOWN_UNKNOWN = 10


class PredictionArchive:
    """Prediction files of replicas that have ended, in `CORTEX_HOME/predictions/API`."""

    def __init__(self, home: Home, logger: Logger) -> None:
        self._root = home.path / PREDICTIONS_FOLDER
        self._logger = logger

    def add(self, api: str, folder: Path) -> None:
        """Copy the prediction files in the metrics folder of an ended replica. Idempotent."""
        archive = self._root / api
        try:
            for file in _files(folder / PREDICTIONS_FOLDER):
                copy_predictions(file, archive / f"{folder.name}-{file.name}")
        except OSError as error:
            self._logger.warning("predictions of an ended replica can't be kept", replica=folder.name, error=error)
        for file in sorted(_files(archive), key=_modified, reverse=True)[KEPT_FILES:]:
            file.unlink(missing_ok=True)

    def files(self, api: str) -> list[Path]:
        """Return the files of an API."""
        return _files(self._root / api)

    def keep_only(self, apis: Collection[str]) -> None:
        """Delete the files of all other APIs."""
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            if folder.name not in apis:
                shutil.rmtree(folder, ignore_errors=True)


class Tracking:
    """Drift detection runs in `run`. `update`, `describe` and `add_feedback` block: call them on a thread."""

    def __init__(
        self,
        home: Home,
        apis: ApiStore,
        totals: MetricTotals,
        archive: PredictionArchive,
        store: PredictionStore,
        logger: Logger,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._home = home
        self._apis = apis
        self._totals = totals
        self._archive = archive
        self._store = store
        self._logger = logger
        self._now = now
        self._cleaned_at = 0.0
        self._error_log = LoopErrorLog(logger, "tracking of predictions failed")

    async def run(self) -> None:
        """Update all APIs periodically."""
        while True:
            with self._logging_errors():
                for record in self._apis.records():
                    if record.spec.tracker is not None:
                        with self._logging_errors(record.name):
                            await asyncio.to_thread(self.update, record)
                if self._now() - self._cleaned_at > _CLEAN_S:
                    self._cleaned_at = self._now()
                    await asyncio.to_thread(self.clean, {record.name for record in self._apis.records()})
            await asyncio.sleep(UPDATE_S)

    @contextlib.contextmanager
    def _logging_errors(self, api: str = "") -> Iterator[None]:
        try:
            yield
            if api:
                self._error_log.succeeded()
        except Exception as error:  # of any kind: the next update must happen
            self._error_log.failed(error, api=api)

    def update(self, record: ApiRecord) -> None:
        """Compare the current window with the baseline, if it is complete."""
        revision, tracker = _served(record)
        if tracker is None:
            return
        before = self._drift(record)
        if before is None:
            before = self._first_drift(record.name, revision, tracker)
            self._store_drift(record.name, before)
        counts = categories(self._totals.of(record.name), tracker.model_type == CLASSIFICATION)
        settings = drift.DriftSettings(tracker.model_type == CLASSIFICATION, tracker.window, tracker.false_alarm_rate)
        after = drift.observe(before, counts, settings, self._now())
        if after is not before:
            self._store_drift(record.name, after)
            self._log_change(record.name, before, after)

    def describe(self, record: ApiRecord) -> Json | None:
        """Return the JSON for `cortex get API`; None for an API without a tracker."""
        revision, tracker = _served(record)
        if tracker is None:
            return None
        state = self._drift(record) or self._first_drift(record.name, revision, tracker)
        numbers = self._totals.of(record.name)
        counts = categories(numbers, tracker.model_type == CLASSIFICATION)
        pending = sum(max(0, count - state.mark.get(name, 0)) for name, count in counts.items())
        hours = self._store.hours(record.name, tracker.model_type)
        return {
            **summarize(numbers, tracker),
            "drift": describe_drift(state, pending, tracker),
            "truth": describe_truth(hours, tracker),
        }

    def add_feedback(self, record: ApiRecord, truths: Truths) -> Json:
        """Compare truths with the predictions, and store the errors; each request counts once. Raises: InputError."""
        tracker = require_tracker(record)
        predictions = self._store.predictions(record.name, tracker.model_type, truths)
        predictions |= self._find(record.name, _kind(tracker), truths.keys() - predictions.keys())
        self._store.add_truths(record.name, tracker.model_type, score(truths, predictions, self._now))
        unknown = [request_id for request_id in truths if request_id not in predictions]
        return {"matched": len(predictions), "unknown": len(unknown), "unknown_ids": unknown[:_SHOWN_UNKNOWN]}

    def clean(self, apis: Collection[str]) -> None:
        """Delete old feedback, and archived predictions of APIs other than `apis`."""
        self._store.forget_before(int(self._now()) // 3600 - KEPT_HOURS)
        self._archive.keep_only(apis)

    def _find(self, api: str, kind: PredictionKind, request_ids: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        missing = set(request_ids)
        # List running replicas first: one that ends meanwhile is in the archive by then.
        running = [file for folder in self._totals.folders(api) for file in _files(folder / PREDICTIONS_FOLDER)]
        for file in [*running, *self._archive.files(api)]:
            if not missing:
                break
            more = find_predictions(file, kind, missing)
            found |= {request_id: as_text(value) for request_id, value in more.items()}
            missing -= more.keys()
        return found

    def _drift(self, record: ApiRecord) -> drift.Drift | None:
        """Return the stored state of the served model; None before its first update."""
        data = self._store.drift(record.name)
        state = drift.Drift.from_data(json.loads(data)) if data else None
        return state if state and state.model == _model(_served(record)[0]) else None

    def _first_drift(self, api: str, revision: Revision, tracker: TrackerConfig) -> drift.Drift:
        """Return the state of a model before its first update.

        Its window begins with the predictions of its running replicas, which may have served for seconds. Without an
        earlier model, all predictions belong to it.
        """
        baseline, problem = self._baseline(revision, tracker)
        mark: drift.Counts = {}
        if self._store.drift(api) is not None:
            others = self._totals.of(api, without=revision.hash)
            mark = categories(others, tracker.model_type == CLASSIFICATION)
        return drift.begin(_model(revision), mark, baseline, problem)

    def _store_drift(self, api: str, state: drift.Drift) -> None:
        self._store.set_drift(api, json.dumps(state.to_data()))

    def _baseline(self, revision: Revision, tracker: TrackerConfig) -> tuple[drift.Counts, str]:
        """Return the baseline of the project and the problem with it; empty if there is none."""
        if not tracker.baseline:
            return {}, ""
        file = self._home.projects_dir / revision.project_hash / tracker.baseline
        try:
            return drift.parse_baseline(file.read_bytes(), tracker.model_type == CLASSIFICATION), ""
        except (OSError, InputError) as error:
            return {}, f"{tracker.baseline} can't be used: {error}; the first predictions are the baseline"

    def _log_change(self, api: str, before: drift.Drift, after: drift.Drift) -> None:
        last, previous = after.last, before.last
        was_drift = previous is not None and previous.is_drift
        if last is not None and last is not previous and last.is_drift != was_drift:
            message = "predictions drift" if last.is_drift else "predictions no longer drift"
            self._logger.warning(message, api=api, psi=f"{last.psi:.4f}", threshold=f"{last.threshold:.4f}")


def require_tracker(record: ApiRecord) -> TrackerConfig:
    """Return the tracker of the served revision. Raises: InputError."""
    _, tracker = _served(record)
    if tracker is None:
        raise InputError(f"{record.name} has no `tracker`: its predictions are not recorded")
    return tracker


def _served(record: ApiRecord) -> tuple[Revision, TrackerConfig | None]:
    revision = record.serving or record.target
    return revision, revision.spec.tracker


def _model(revision: Revision) -> str:
    """Return a hash that changes with the project, the handler's settings and the tracker, but not on refresh."""
    spec = revision.spec
    tracker = spec.tracker.model_dump(mode="json") if spec.tracker else None
    parts = [revision.project_hash, spec.handler.model_dump(mode="json"), tracker]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _kind(tracker: TrackerConfig) -> PredictionKind:
    return PredictionKind.CLASS if tracker.model_type == CLASSIFICATION else PredictionKind.NUMBER


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.iterdir() if not path.name.endswith(".part")]
    return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
