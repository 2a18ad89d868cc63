"""The canaries' control loop: read the numbers of both revisions, judge, and promote or roll back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from cortex.errors import CortexError
from cortex.operator.canary.disagreement import PairedPredictions, kind_of
from cortex.operator.canary.judge import WARM_UP_S, RevisionNumbers
from cortex.operator.canary.trials import Trial, TrialOutcome, Trials, advance, is_of_models
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger
from cortex.worker.monitoring.answers import ANSWERS_FOLDER
from cortex.worker.monitoring.metrics import merge_series
from cortex.worker.monitoring.tracker import PREDICTIONS_FOLDER

#: Length of a window; longer if a revision has no request in it.
WINDOW_S = 5.0


@dataclass(frozen=True)
class _Mark:
    """The numbers at the beginning of a window."""

    number: int  #: of the new revision
    old: RevisionNumbers
    new: RevisionNumbers


class CanaryController:
    """Advances all trials.

    `roll_back` (api, number of the entry, revision) deploys an entry of an API's history again if the newest revision
    is still this one. Raises: CortexError.
    """

    def __init__(
        self,
        apis: ApiStore,
        trials: Trials,
        totals: MetricTotals,
        roll_back: Callable[[str, int | None, str], Awaitable[object]],
        wake: Callable[[], None],
        logger: Logger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._apis = apis
        self._trials = trials
        self._totals = totals
        self._roll_back = roll_back
        self._wake = wake
        self._logger = logger
        self._clock = clock
        self._marks: dict[str, _Mark] = {}
        self._pairs: dict[str, tuple[str, PairedPredictions]] = {}  #: by API, with the revision that gets copies
        self._served_at: dict[str, dict[str, float]] = {}  #: by API and replica of its canary: when it first had served
        self._failed_rollbacks: dict[str, str] = {}  #: the revision, by API; each is logged once
        self._error_log = LoopErrorLog(logger, "judging canaries failed")

    async def run(self) -> None:
        """Judge all trials after each window. Forget those of APIs that were deleted."""
        names: set[str] | None = None
        while True:
            await asyncio.sleep(WINDOW_S)
            records = self._apis.records()
            try:
                if names != (present := {record.name for record in records}):
                    self._trials.keep_only(present)
                    names = present
            except Exception as error:  # of any kind: the next window must be judged
                self._error_log.failed(error, api="")
            for record in records:
                try:
                    await self.judge(record)
                    self._error_log.succeeded()
                except Exception as error:  # as above
                    self._error_log.failed(error, api=record.name)

    async def judge(self, record: ApiRecord) -> None:
        """Judge the window of one API that has ended, if it has an open trial."""
        known = self._trials.of(record)
        if known is None:
            return
        trial, judge = known
        if trial.outcome is TrialOutcome.ROLLED_BACK:  # the operator ended before it was carried out
            await self._return(record, trial)
        if not trial.is_open:
            return
        if record.failure is not None and is_of_models(record):  # nobody deployed it who would see that it fails
            reason = f"its replicas do not start: {record.failure.message}"
            await self._settle(record, replace(trial, outcome=TrialOutcome.ROLLED_BACK, reason=reason))
            return
        (old, new), serving = await asyncio.to_thread(self._read, record.name, trial)
        mark, now = self._marks.get(record.name), self._clock()
        is_warm = self._is_warm(record.name, serving, now)
        pairs, different = await asyncio.to_thread(self._read_pairs, record, trial)
        if mark is None or mark.number != trial.number:
            self._marks[record.name] = _Mark(trial.number, old, RevisionNumbers() if trial.began_at is None else new)
            return
        more_old, more_new = old.since(mark.old), new.since(mark.new)
        if more_old is None or more_new is None:  # a replica has ended, and took its numbers with it
            self._marks[record.name] = _Mark(trial.number, old, new)
        elif more_old.requests and more_new.requests:
            self._marks[record.name] = _Mark(trial.number, old, new)
            judge.observe(more_old, more_new, is_warm, now)
            requests = trial.step_requests + more_new.requests
            trial = replace(trial, began_at=trial.began_at or now, step_requests=requests)
        judge.observe_pairs(pairs, different)
        config = record.spec.update_strategy.canary
        assert config is not None
        age_s = now - record.updated_at.timestamp()
        after = advance(trial, config, judge.findings(), age_s)
        if after.step != trial.step:
            judge.begin_step()
        await self._settle(record, after)

    def _read(self, api: str, trial: Trial) -> tuple[list[RevisionNumbers], list[str]]:
        """Return the numbers of both revisions, and the replicas of the new one that have served."""
        by_revision = [self._totals.of_revision(api, revision) for revision in (trial.old_revision, trial.revision)]
        numbers = [RevisionNumbers.of(merge_series(each.values()), frozenset(each)) for each in by_revision]
        return numbers, [name for name, series in by_revision[1].items() if RevisionNumbers.of(series).requests]

    def _read_pairs(self, record: ApiRecord, trial: Trial) -> tuple[int, int]:
        """Return the requests that both revisions answered since the last window, and how many predictions differ."""
        canary, tracker = record.spec.update_strategy.canary, record.spec.tracker
        if not (trial.is_shadow and canary is not None and canary.max_disagreement is not None):
            self._pairs.pop(record.name, None)
            return 0, 0
        known = self._pairs.get(record.name)
        if known is None or known[0] != trial.revision:
            known = trial.revision, PairedPredictions(kind_of(tracker))
            self._pairs[record.name] = known
        folder = ANSWERS_FOLDER if tracker is None else PREDICTIONS_FOLDER
        of = (self._totals.ring_files(record.name, each, folder) for each in (trial.old_revision, trial.revision))
        return known[1].read(*of)

    def _is_warm(self, api: str, serving: Iterable[str], now: float) -> bool:
        """Return whether no replica is new: each step starts some, whose first requests are slow."""
        before = self._served_at.get(api, {})
        self._served_at[api] = {name: before.get(name, now) for name in serving}
        return all(now - began_at > WARM_UP_S for began_at in self._served_at[api].values())

    async def _settle(self, record: ApiRecord, trial: Trial) -> None:
        present = self._apis.get(record.name)
        known = self._trials.of(present) if present is not None else None
        if present is None or known is None or known[0].number != trial.number:
            return  # it was deployed again or deleted meanwhile
        record, before = present, known[0]
        if trial == before or not before.is_open:  # a person may have promoted it meanwhile
            return
        self._trials.put(record, trial)
        if (trial.step, trial.is_shadow, trial.outcome) != (before.step, before.is_shadow, before.outcome):
            number, percent = trial.number, self._trials.percents([record]).get(record.name)
            self._logger.info(
                "canary", api=record.name, revision=number, outcome=trial.outcome, percent=percent, reason=trial.reason
            )
            self._wake()
        if trial.outcome is TrialOutcome.ROLLED_BACK:
            await self._return(record, trial)

    async def _return(self, record: ApiRecord, trial: Trial) -> None:
        try:
            await self._roll_back(record.name, trial.old_number, trial.revision)
        except CortexError as error:  # the old files are gone, for example; the new revision gets no requests
            if self._failed_rollbacks.get(record.name) != trial.revision:
                self._failed_rollbacks[record.name] = trial.revision
                self._logger.error("a canary can't be rolled back", api=record.name, revision=trial.number, error=error)
