"""Follows what APIs with a tracker predict: looks for drift, keeps predictions for later truth, and tells of both."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from cortex.config.schema import TrackerConfig
from cortex.errors import InputError
from cortex.home import Home
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.monitoring import drift
from cortex.operator.monitoring.baseline import parse_baseline
from cortex.operator.monitoring.feedback import Told, as_text, judge
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.monitoring.prediction_summary import categories, describe_drift, describe_truth, summarize
from cortex.replica.predictions import FOLDER, PredictionKind, copy_predictions, find_predictions
from cortex.replica.tracker import CLASSIFICATION
from cortex.state.apis import ApiRecord, ApiStore, Target
from cortex.state.predictions import PredictionStore
from cortex.telemetry import Logger

#: How often totals are looked at.
LOOK_S = 5.0
#: Files of predictions that are kept of an API's replicas that ended, the newest ones.
KEPT_FILES = 32
#: Truth about older predictions is forgotten, as it is in the original.
KEPT_HOURS = 14 * 24
_SWEEP_S = 600.0
_SHOWN_UNKNOWN = 10

Json = dict[str, Any]


class Tracking:
    """`run` owns drift; the other methods only read it. `look`, `describe` and `tell` block: call them on threads."""

    def __init__(
        self,
        home: Home,
        apis: ApiStore,
        totals: MetricTotals,
        store: PredictionStore,
        logger: Logger,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._home = home
        self._apis = apis
        self._totals = totals
        self._store = store
        self._logger = logger
        self._now = now
        self._swept_at = 0.0
        self._error_log = LoopErrorLog(logger, "predictions can't be followed")
        totals.before_removal.append(self.keep_predictions)

    async def run(self) -> None:
        """Look at all APIs, again and again."""
        while True:
            with self._trying():
                for record in self._apis.records():
                    if record.spec.tracker is not None:
                        with self._trying(record.name):
                            await asyncio.to_thread(self.look, record)
                if self._now() - self._swept_at > _SWEEP_S:
                    self._swept_at = self._now()
                    await asyncio.to_thread(self.sweep, {record.name for record in self._apis.records()})
            await asyncio.sleep(LOOK_S)

    @contextlib.contextmanager
    def _trying(self, api: str = "") -> Iterator[None]:
        try:
            yield
            if api:
                self._error_log.succeeded()
        except Exception as error:  # whatever it is, it must be tried again
            self._error_log.failed(error, api=api)

    def look(self, record: ApiRecord) -> None:
        """Compare a window with the baseline, where one has become complete."""
        target, tracker = _served(record)
        if tracker is None:
            return
        counts = categories(self._totals.of(record.name), tracker.model_type == CLASSIFICATION)
        before = self._drift(record)
        if before is None:
            given, problem = self._baseline(target, tracker)
            # Whatever an API has predicted before the first look is its first model's.
            mark = {} if self._store.drift(record.name) is None else counts
            before = drift.begin(_model(target), mark, given, problem)
            self._set(record.name, before)
        settings = drift.Settings(tracker.model_type == CLASSIFICATION, tracker.window, tracker.false_alarm_rate)
        after = drift.observe(before, counts, settings, self._now())
        if after is not before:
            self._set(record.name, after)
            self._tell_of_drift(record.name, before, after)

    def describe(self, record: ApiRecord) -> Json | None:
        """Return what `cortex get API` shows; None for an API without a tracker."""
        _, tracker = _served(record)
        if tracker is None:
            return None
        numbers = self._totals.of(record.name)
        known = self._drift(record)
        counts = categories(numbers, tracker.model_type == CLASSIFICATION)
        pending = sum(max(0, count - (known.mark.get(name, 0) if known else 0)) for name, count in counts.items())
        truth = self._store.hours(record.name, tracker.model_type)
        return {
            **summarize(numbers, tracker),
            "drift": describe_drift(known, pending, tracker),
            "truth": describe_truth(truth, tracker),
        }

    def tell(self, record: ApiRecord, told: Told) -> Json:
        """Judge predictions by what was right; each request counts once. Raises: InputError."""
        tracker = require_tracker(record)
        known = self._store.predictions(record.name, tracker.model_type, told)
        known |= self._find(record.name, _kind(tracker), told.keys() - known.keys())
        self._store.add_truths(record.name, tracker.model_type, judge(told, known, self._now))
        unknown = [request_id for request_id in told if request_id not in known]
        return {"matched": len(known), "unknown": len(unknown), "unknown_ids": unknown[:_SHOWN_UNKNOWN]}

    def keep_predictions(self, api: str, folder: Path) -> None:
        """Copy the last predictions of a replica that has ended; repeating it changes nothing."""
        kept = self._kept_folder(api)
        try:
            for ring in _files(folder / FOLDER):
                copy_predictions(ring, kept / f"{folder.name}-{ring.name}")
        except OSError as error:
            self._logger.warning("predictions of a replica can't be kept", replica=folder.name, error=error)
        for file in sorted(_files(kept), key=_modified, reverse=True)[KEPT_FILES:]:
            file.unlink(missing_ok=True)

    def sweep(self, apis: Collection[str]) -> None:
        """Forget what is old, and what belongs to none of `apis`."""
        self._store.forget_before(int(self._now()) // 3600 - KEPT_HOURS)
        root = self._home.path / FOLDER
        for folder in root.iterdir() if root.is_dir() else ():
            if folder.name not in apis:
                shutil.rmtree(folder, ignore_errors=True)

    def _find(self, api: str, kind: PredictionKind, wanted: Collection[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        left = set(wanted)
        # Those that run first: what ends in the meantime is among the kept ones by then.
        for file in [*self._rings(api), *_files(self._kept_folder(api))]:
            if not left:
                break
            more = find_predictions(file, kind, left)
            found |= {request_id: as_text(value) for request_id, value in more.items()}
            left -= more.keys()
        return found

    def _rings(self, api: str) -> Iterator[Path]:
        for folder in self._totals.folders(api):
            yield from _files(folder / FOLDER)

    def _kept_folder(self, api: str) -> Path:
        return self._home.path / FOLDER / api

    def _drift(self, record: ApiRecord) -> drift.Drift | None:
        """Return what is known of the model that is served; None at its beginning."""
        data = self._store.drift(record.name)
        known = drift.Drift.from_data(json.loads(data)) if data else None
        return known if known and known.model == _model(_served(record)[0]) else None

    def _set(self, api: str, known: drift.Drift) -> None:
        self._store.set_drift(api, json.dumps(known.to_data()))

    def _baseline(self, target: Target, tracker: TrackerConfig) -> tuple[drift.Counts, str]:
        """Return the baseline of the project, empty if there is none, and why it can't be used."""
        if not tracker.baseline:
            return {}, ""
        file = self._home.projects_dir / target.project_hash / tracker.baseline
        try:
            return parse_baseline(file.read_bytes(), tracker.model_type == CLASSIFICATION), ""
        except (OSError, InputError) as error:
            return {}, f"{tracker.baseline} is no baseline: {error}; the first predictions take its place"

    def _tell_of_drift(self, api: str, before: drift.Drift, after: drift.Drift) -> None:
        last, previous = after.last, before.last
        was_drift = previous is not None and previous.is_drift
        if last is not None and last is not previous and last.is_drift != was_drift:
            message = "predictions drift" if last.is_drift else "predictions do not drift any more"
            self._logger.warning(message, api=api, psi=f"{last.psi:.4f}", threshold=f"{last.threshold:.4f}")


def require_tracker(record: ApiRecord) -> TrackerConfig:
    """Return the tracker of what is served. Raises: InputError."""
    _, tracker = _served(record)
    if tracker is None:
        raise InputError(f"{record.name} has no `tracker`: its predictions are not kept")
    return tracker


def _served(record: ApiRecord) -> tuple[Target, TrackerConfig | None]:
    target = record.serving or record.target
    return target, target.spec.tracker


def _model(target: Target) -> str:
    """Return what predicts: other code, settings of it, or a tracker begin anew; `refresh` does not."""
    spec = target.spec
    tracker = spec.tracker.model_dump(mode="json") if spec.tracker else None
    parts = [target.project_hash, spec.handler.model_dump(mode="json"), tracker]
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
