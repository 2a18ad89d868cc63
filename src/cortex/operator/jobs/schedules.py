"""Schedules: submit the jobs of APIs when their cron expressions are due, exactly once per run.

A job and the record of its submission are stored in one transaction. Runs missed while no operator ran are submitted by
the next operator, but only the latest run of each schedule. With `overlap: skip`, a run is skipped while an earlier one
is not over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from functools import lru_cache, partial
from typing import TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim
from sqlalchemy import Connection

from cortex.config.schema import Schedule
from cortex.errors import ConflictError, CortexError, InputError
from cortex.jobs import schedule_state
from cortex.jobs.intake.submission import parse_body
from cortex.jobs.schedule_state import ScheduleState, read_schedules
from cortex.jobs.spec import JobRecord
from cortex.jobs.store import JobStore
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.jobs.service import JobService, ScheduledRun
from cortex.payloads.json_object import Json
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger

#: Interval between checks, and so the maximum delay of a submission. Schedules have a resolution of minutes.
_POLL_S = 0.5
#: Delay before a failed submission is retried.
_RETRY_S = 10.0
#: Schedules restart if the clock was set back by more than this.
_SET_BACK_S = 3600.0
#: The last due time is searched in a window of this length, which is doubled until one is found.
_FIRST_WINDOW_S = 2 * 3600.0

_T = TypeVar("_T")


class Schedules:
    """Submits the jobs of all schedules. `clock` returns UNIX seconds."""

    def __init__(
        self, apis: ApiStore, store: JobStore, jobs: JobService, logger: Logger, clock: Callable[[], float] = time.time
    ) -> None:
        self._apis = apis
        self._store = store
        self._jobs = jobs
        self._logger = logger
        self._clock = clock
        self._known: dict[str, ScheduleState] | None = None  #: stored states; None: must be read again
        self._submitting: dict[str, asyncio.Task[None]] = {}
        self._held_until: dict[str, float] = {}
        self._error_log = LoopErrorLog(logger, "checking schedules failed")
        self._unreadable: set[str] = set()  #: schedules whose error was logged

    async def run(self) -> None:
        """Submit due runs until cancelled."""
        try:
            while True:
                try:
                    await self.submit_due()
                    self._error_log.succeeded()
                except Exception as error:  # a failed check must not end the loop
                    self._error_log.failed(error)
                await asyncio.sleep(_POLL_S)
        finally:
            for task in self._submitting.values():
                task.cancel()
            await asyncio.gather(*self._submitting.values(), return_exceptions=True)

    async def submit_due(self) -> list[asyncio.Task[None]]:
        """Start to submit the runs that are due now; return all submissions in progress."""
        if self._known is None:
            self._known = await self._store.read(read_schedules)
        now, known = self._clock(), self._known
        scheduled = {record.name: record for record in self._apis.records() if record.spec.schedule is not None}
        for api in known.keys() - scheduled.keys():
            await self._change(partial(schedule_state.remove, api=api))
        for record in scheduled.values():
            try:
                await self._check(record, known.get(record.name), now)
                self._unreadable.discard(record.name)
            except (ValueError, ZoneInfoNotFoundError) as error:  # for example, its time zone is no longer known
                if record.name not in self._unreadable:
                    self._unreadable.add(record.name)
                    self._logger.error("a schedule can't be read", api=record.name, error=error)
        return list(self._submitting.values())

    async def run_now(self, record: ApiRecord) -> JobRecord:
        """Submit the job of an API's schedule now, besides the runs that are due.

        Raises: InputError without a schedule, ConflictError if it may not overlap with an earlier run, and as
        `JobService.submit`.
        """
        api, schedule = record.name, record.spec.schedule
        if schedule is None:
            raise InputError(f"{api} has no schedule")
        now = self._clock()
        submission = parse_body(schedule.submission, self._jobs.limits(api), ignores_unknown=True)
        extra_writes = partial(schedule_state.record_run, api=api, at=now, may_overlap=schedule.overlap == "allow")
        try:
            return await self._jobs.submit(api, submission, run=ScheduledRun(now, extra_writes), is_trusted=True)
        finally:
            self._known = None

    async def describe(self, record: ApiRecord) -> Json | None:
        """Return an API's schedule as JSON, with its last and next run; None without a schedule."""
        schedule = record.spec.schedule
        if schedule is None:
            return None
        known = (await self._store.read(read_schedules)).get(record.name)
        error = known.error if known else ""
        try:
            next_run = _moment(_next_after(Cron.of(schedule), self._clock()), schedule)
        except (ValueError, ZoneInfoNotFoundError):
            next_run = None
            error = f"this machine does not know the time zone {schedule.timezone}; deploy the API with another one"
        return {
            "cron": schedule.cron,
            "timezone": schedule.timezone,
            "next_run": next_run,
            "last_run": _moment(known.last_run_at, schedule) if known else None,
            "last_job_id": known.last_job_id if known else None,
            "error": error,
            "overlap": schedule.overlap,
            "skipped_runs": known.skipped if known else 0,
            "last_skipped": _moment(known.last_skip_at, schedule) if known else None,
            "last_skipped_for": known.last_skip_job_id if known else None,
        }

    async def _check(self, record: ApiRecord, known: ScheduleState | None, now: float) -> None:
        assert record.spec.schedule is not None
        cron = Cron.of(record.spec.schedule)
        if known is None or known.key != cron.key:
            since = min(now, record.updated_at.timestamp())
            await self._change(partial(schedule_state.start, api=record.name, key=cron.key, at=since))
            known = ScheduleState(cron.key, since)
        elif known.handled_at - now > _SET_BACK_S:
            self._logger.warning("the clock was set back: schedule restarted", api=record.name)
            await self._change(partial(schedule_state.restart, api=record.name, at=now))
            return
        is_held = 0.0 < self._held_until.get(record.name, 0.0) - now <= _RETRY_S
        if is_held or record.name in self._submitting:
            return
        due = _next_after(cron, known.handled_at)
        if due is None or due > now:
            return
        latest = cron.last_until(now, known.handled_at) or due
        submission = self._submit(record, cron, latest)
        task = asyncio.create_task(submission, name=f"submit scheduled run of {record.name}")
        self._submitting[record.name] = task
        task.add_done_callback(partial(self._ended, record.name))

    def _ended(self, api: str, task: asyncio.Task[None]) -> None:
        del self._submitting[api]
        if not task.cancelled() and (error := task.exception()):
            self._held_until[api] = self._clock() + _RETRY_S
            known = isinstance(error, CortexError)
            self._logger.error("scheduled run can't be submitted", None if known else error, api=api, error=error)

    async def _submit(self, record: ApiRecord, cron: Cron, due: float) -> None:
        """Submit a job, or skip the run. Permanent errors are stored; temporary ones are retried."""
        api, schedule = record.name, record.spec.schedule
        assert schedule is not None
        may_overlap = schedule.overlap == "allow"
        if not may_overlap and await self._skips(api, cron, due, schedule):
            return
        try:
            # A deploy refuses unknown keys; a schedule of an older version may have some.
            submission = parse_body(schedule.submission, self._jobs.limits(api), ignores_unknown=True)
        except CortexError as error:
            self._logger.error("scheduled run can't be submitted", api=api, error=error)
            await self._change(partial(schedule_state.fail, api=api, key=cron.key, at=due, error=str(error)))
            return
        extra_writes = partial(schedule_state.claim, api=api, key=cron.key, at=due, may_overlap=may_overlap)
        try:
            job = await self._jobs.submit(api, submission, run=ScheduledRun(due, extra_writes), is_trusted=True)
            self._logger.info("job submitted by its schedule", api=api, job=job.id, due=_moment(due, schedule))
        except ConflictError as error:  # the check read a state that an earlier submission has changed
            self._logger.warning("scheduled run was not submitted", api=api, error=error)
        except CortexError as error:  # for example, a bucket does not respond
            self._held_until[api] = self._clock() + _RETRY_S
            await self._note(api, str(error))
        finally:
            self._known = None

    async def _skips(self, api: str, cron: Cron, due: float, schedule: Schedule) -> bool:
        """Skip and log a run if an earlier one is not over; return whether it was skipped."""
        running = await self._change(partial(schedule_state.skip_overlapping, api=api, key=cron.key, at=due))
        if running is None:
            return False
        self._logger.info(
            "scheduled run skipped: an earlier run is not over", api=api, job=running, due=_moment(due, schedule)
        )
        return True

    async def _note(self, api: str, error: str) -> None:
        """Log and store, once, why a run can't be submitted yet."""
        known = (await self._store.read(read_schedules)).get(api)
        if known is not None and known.error != error:
            self._logger.warning("scheduled run can't be submitted yet", api=api, error=error)
            await self._change(partial(schedule_state.set_error, api=api, error=error))

    async def _change(self, change: Callable[[Connection], _T]) -> _T:
        try:
            return await self._store.write(change)
        finally:
            self._known = None


@dataclass(frozen=True)
class Cron:
    """A cron expression in a time zone. Pure; all times are UNIX seconds.

    If the clock is put forward, runs due in the omitted hour are due at its end. If it is put back, expressions that
    name the hour are due once; those due every hour or every few minutes are due in both hours.
    """

    expression: str
    timezone: str = "UTC"

    @classmethod
    def of(cls, schedule: Schedule) -> Cron:
        """Return the expression of an API's schedule."""
        return cls(schedule.cron, schedule.timezone)

    @property
    def key(self) -> str:
        """A text that identifies the expression and its time zone."""
        return f"{self.expression} {self.timezone}"

    def next_after(self, moment: float) -> float | None:
        """Return the first due time after `moment`; None: never."""
        return next(self._after(moment), None)

    def last_until(self, moment: float, since: float) -> float | None:
        """Return the last due time after `since` and until `moment`, or None."""
        window_s = _FIRST_WINDOW_S
        while since < moment:
            begin = max(since, moment - window_s)
            last = None
            for due in self._after(begin):
                if due > moment:
                    break
                last = due
            if last is not None or begin == since:
                return last
            window_s *= 2
        return None

    def _after(self, moment: float) -> Iterator[float]:
        """Yield every due time after `moment`, in order."""
        last = moment
        for found in CronSim(self.expression, datetime.fromtimestamp(moment, zone(self.timezone))):
            due = found.timestamp()
            # In an hour that occurs twice, the library returns the first occurrence, which may be over.
            if due > last:
                last = due
                yield due


def zone(name: str) -> tzinfo:
    """Return a time zone; UTC works on machines without a time zone database. Raises: ZoneInfoNotFoundError."""
    return UTC if name == "UTC" else ZoneInfo(name)


@lru_cache(maxsize=4096)
def _next_after(cron: Cron, moment: float) -> float | None:
    """Cache the next due time, which every check needs."""
    return cron.next_after(moment)


def _moment(at: float | None, schedule: Schedule) -> str | None:
    if at is None:
        return None
    try:
        shown_in = zone(schedule.timezone)
    except (ValueError, ZoneInfoNotFoundError):
        shown_in = UTC
    return datetime.fromtimestamp(at, shown_in).isoformat()
