"""Submits the jobs that are due by the schedules of APIs: each once, however often the operator dies.

A job and the note that it was submitted are one transaction of the store. What was due while no operator ran is
submitted by the next one, but only the latest of it. With `overlap: skip` nothing is while an earlier run is not over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, TypeVar
from zoneinfo import ZoneInfoNotFoundError

from sqlalchemy import Connection

from cortex.config.schema import Schedule
from cortex.errors import ConflictError, CortexError
from cortex.jobs import schedule_state as ticks
from cortex.jobs.intake.task_submission import parse_body
from cortex.jobs.schedule_state import Ticks
from cortex.jobs.store import JobStore
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.jobs.cron import Cron, zone
from cortex.operator.jobs.service import Due, Jobs
from cortex.state.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger

#: Schedules count in minutes; a job is submitted at most this much later.
_LOOK_S = 0.5
#: What can't be submitted now is tried again after this long.
_RETRY_S = 10.0
#: A clock that was set back by more than this has schedules begin anew.
_SET_BACK_S = 3600.0

Json = dict[str, Any]
_T = TypeVar("_T")


class Schedules:
    """The schedules of all APIs. `clock` tells UNIX seconds."""

    def __init__(
        self, apis: ApiStore, store: JobStore, jobs: Jobs, logger: Logger, clock: Callable[[], float] = time.time
    ) -> None:
        self._apis = apis
        self._store = store
        self._jobs = jobs
        self._logger = logger
        self._clock = clock
        self._known: dict[str, Ticks] | None = None  #: what is stored; None: to be read
        self._submitting: dict[str, asyncio.Task[None]] = {}
        self._held_until: dict[str, float] = {}
        self._error_log = LoopErrorLog(logger, "schedules can't be looked at")
        self._unreadable: set[str] = set()  #: those that the log tells of

    async def run(self) -> None:
        """Submit what is due until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                    self._error_log.succeeded()
                except Exception as error:  # one bad look must not end the loop
                    self._error_log.failed(error)
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._submitting.values():
                task.cancel()
            await asyncio.gather(*self._submitting.values(), return_exceptions=True)

    async def look(self) -> list[asyncio.Task[None]]:
        """Begin to submit what is due now, and return what is under way."""
        if self._known is None:
            self._known = await self._store.ticks()
        now, known = self._clock(), self._known
        scheduled = {record.name: record for record in self._apis.records() if record.spec.schedule is not None}
        for api in known.keys() - scheduled.keys():
            await self._change(partial(ticks.forget, api=api))
        for record in scheduled.values():
            try:
                await self._look_at(record, known.get(record.name), now)
                self._unreadable.discard(record.name)
            except (ValueError, ZoneInfoNotFoundError) as error:  # its time zone is not known any more, say
                if record.name not in self._unreadable:
                    self._unreadable.add(record.name)
                    self._logger.error("a schedule can't be read", api=record.name, error=error)
        return list(self._submitting.values())

    async def describe(self, record: ApiRecord) -> Json | None:
        """Return when an API's jobs are submitted, were last, and will be next; None without a schedule."""
        schedule = record.spec.schedule
        if schedule is None:
            return None
        known = (await self._store.ticks()).get(record.name)
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

    async def _look_at(self, record: ApiRecord, known: Ticks | None, now: float) -> None:
        assert record.spec.schedule is not None
        cron = Cron.of(record.spec.schedule)
        if known is None or known.key != cron.key:
            since = min(now, record.updated_at.timestamp())
            await self._change(partial(ticks.begin, api=record.name, key=cron.key, at=since))
            known = Ticks(cron.key, since)
        elif known.handled_at - now > _SET_BACK_S:
            self._logger.warning("the clock was set back: a schedule begins anew", api=record.name)
            await self._change(partial(ticks.begin_anew, api=record.name, at=now))
            return
        is_held = 0.0 < self._held_until.get(record.name, 0.0) - now <= _RETRY_S
        if is_held or record.name in self._submitting:
            return
        due = _next_after(cron, known.handled_at)
        if due is None or due > now:
            return
        latest = cron.last_until(now, known.handled_at) or due
        submission = self._submit(record, cron, latest)
        task = asyncio.create_task(submission, name=f"submit what is due of {record.name}")
        self._submitting[record.name] = task
        task.add_done_callback(partial(self._ended, record.name))

    def _ended(self, api: str, task: asyncio.Task[None]) -> None:
        del self._submitting[api]
        if not task.cancelled() and (error := task.exception()):
            self._held_until[api] = self._clock() + _RETRY_S
            known = isinstance(error, CortexError)
            self._logger.error("what is due can't be submitted", None if known else error, api=api, error=error)

    async def _submit(self, record: ApiRecord, cron: Cron, due: float) -> None:
        """Submit a job or skip the run; what can never be submitted is noted, what can't be now is tried again."""
        api, schedule = record.name, record.spec.schedule
        assert schedule is not None
        may_overlap = schedule.overlap == "allow"
        if not may_overlap and await self._skips(api, cron, due, schedule):
            return
        try:
            submission = parse_body(schedule.submission, self._jobs.limits(api))
        except CortexError as error:
            self._logger.error("what is due can't be submitted", api=api, error=error)
            await self._change(partial(ticks.skip, api=api, key=cron.key, at=due, error=str(error)))
            return
        also = partial(ticks.take, api=api, key=cron.key, at=due, may_overlap=may_overlap)
        try:
            job = await self._jobs.submit(api, submission, due=Due(due, also))
            self._logger.info("job submitted by its schedule", api=api, job=job.id, due=_moment(due, schedule))
        except ConflictError as error:  # the look that began this had read what was stored before the one before
            self._logger.warning("what is due was not submitted", api=api, error=error)
        except CortexError as error:  # a bucket does not answer, say
            self._held_until[api] = self._clock() + _RETRY_S
            await self._note(api, str(error))
        finally:
            self._known = None

    async def _skips(self, api: str, cron: Cron, due: float, schedule: Schedule) -> bool:
        """Pass over a run while an earlier one is not over, and tell of it."""
        running = await self._change(partial(ticks.skip_overlapping, api=api, key=cron.key, at=due))
        if running is None:
            return False
        self._logger.info(
            "a run was skipped, as one before is not over", api=api, job=running, due=_moment(due, schedule)
        )
        return True

    async def _note(self, api: str, error: str) -> None:
        """Tell once why what is due can't be submitted yet."""
        known = (await self._store.ticks()).get(api)
        if known is not None and known.error != error:
            self._logger.warning("what is due can't be submitted yet", api=api, error=error)
            await self._change(partial(ticks.note, api=api, error=error))

    async def _change(self, change: Callable[[Connection], _T]) -> _T:
        try:
            return await self._store.change_ticks(change)
        finally:
            self._known = None


@lru_cache(maxsize=4096)
def _next_after(cron: Cron, moment: float) -> float | None:
    """Remember what is asked in every look."""
    return cron.next_after(moment)


def _moment(at: float | None, schedule: Schedule) -> str | None:
    if at is None:
        return None
    try:
        shown_in = zone(schedule.timezone)
    except (ValueError, ZoneInfoNotFoundError):
        shown_in = UTC
    return datetime.fromtimestamp(at, shown_in).isoformat()
