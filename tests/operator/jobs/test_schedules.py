"""Schedules: each run once in spite of crashes; the latest of missed runs; reported errors."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cortex.config.schema import Api
from cortex.home import Home
from cortex.jobs.schedule_state import read_schedules
from cortex.lifecycle import JobStatus
from harness import TESTS
from harness.jobs.crashing_schedules import BEGIN, STEP_S
from harness.jobs.schedules import ScheduleHarness, open_schedules, task_api

pytestmark = pytest.mark.processes

NOON = 1_750_000_800.0 // 86400 * 86400 + 43_200


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def play(home: Home, test: Callable[[ScheduleHarness, Clock], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = Clock()
        async with open_schedules(home, clock) as made:
            await test(made, clock)

    asyncio.run(run())


def test_submits_a_due_run_once(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api(submission={"config": {"a": 1}, "timeout": 60}))
        for clock.now in (NOON, NOON + 59, NOON + 60, NOON + 61, NOON + 119, NOON + 121):
            await made.submit_due()
        assert await made.runs() == [NOON + 60, NOON + 120]
        job = (await made.submitted())[0]
        assert (job.status, job.options.config, job.options.timeout_s) == (JobStatus.PENDING, {"a": 1}, 60)

    play(home, test)


def test_a_run_of_a_user_delays_no_due_run(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api())
        await made.submit_due()
        record = made.apis.get("train")
        assert record is not None
        clock.now += 30
        job = await made.schedules.run_now(record)
        shown = await made.schedules.describe(record)
        assert shown is not None
        assert shown["last_job_id"] == job.id
        clock.now = NOON + 60
        await made.submit_due()
        assert await made.runs() == [NOON + 30, NOON + 60]

    play(home, test)


def test_a_due_run_is_skipped_while_that_of_a_user_is_not_over(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api(overlap="skip"))
        await made.submit_due()
        record = made.apis.get("train")
        assert record is not None
        await made.schedules.run_now(record)
        clock.now += 60
        await made.submit_due()
        assert await made.runs() == [NOON]

    play(home, test)


def test_a_stored_schedule_with_an_unknown_key_still_runs(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api(submission={"time_out": 60}))  # refused by a deploy since, but not when it was deployed
        for clock.now in (NOON, NOON + 60):
            await made.submit_due()
        assert await made.runs() == [NOON + 60]

    play(home, test)


def test_submits_only_the_latest_missed_run(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api(cron="0 * * * *"))
        await made.submit_due()
        clock.now = NOON + 5.5 * 3600
        await made.submit_due()
        await made.submit_due()
        assert await made.runs() == [NOON + 5 * 3600]

    play(home, test)


def test_the_next_operator_continues_the_schedule(home: Home) -> None:
    async def before(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api(cron="0 * * * *"))
        clock.now = NOON + 3600
        await made.submit_due()

    async def after(made: ScheduleHarness, clock: Clock) -> None:
        clock.now = NOON + 3700
        await made.submit_due()
        assert await made.runs() == [NOON + 3600]
        clock.now = NOON + 7200
        await made.submit_due()
        assert await made.runs() == [NOON + 3600, NOON + 7200]

    play(home, before)
    play(home, after)


def test_a_changed_schedule_starts_at_its_deployment_and_an_unchanged_one_continues(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api(cron="0 * * * *"))
        await made.submit_due()
        clock.now = NOON + 5400
        made.deploy(task_api(cron="0 * * * *", submission={"config": {"b": 2}}))  # missed runs still count
        await made.submit_due()
        made.deploy(task_api(cron="15 * * * *"))  # 12:15 was not one of its runs
        await made.submit_due()
        clock.now = NOON + 2 * 3600 + 900
        await made.submit_due()
        assert await made.runs() == [NOON + 3600, NOON + 2 * 3600 + 900]

    play(home, test)


def test_each_api_has_its_own_schedule(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        plain = task_api("plain").model_copy(update={"schedule": None})
        made.deploy(task_api("one", cron="*/2 * * * *"), task_api("two", cron="*/3 * * * *"), plain)
        for minute in range(7):
            clock.now = NOON + 60 * minute
            await made.submit_due()
        assert [len(await made.runs(name)) for name in ("one", "two", "plain")] == [3, 2, 0]
        record = made.apis.get("plain")
        assert record is not None and await made.schedules.describe(record) is None
        made.apis.write([], ["one"])
        await made.submit_due()
        assert set(await made.store.read(read_schedules)) == {"two"}

    play(home, test)


def test_overlap_skip_skips_a_run_while_an_earlier_one_is_not_over(home: Home) -> None:
    async def before(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api(overlap="skip"), task_api("cron", overlap="allow"))
        for clock.now in (NOON + 60, NOON + 120, NOON + 121):
            await made.submit_due()
        assert await made.runs() == [NOON + 60]
        assert await made.runs("cron") == [NOON + 60, NOON + 120]

    async def after(made: ScheduleHarness, clock: Clock) -> None:
        clock.now = NOON + 180
        await made.submit_due()
        (job,) = await made.submitted()
        record = made.apis.get("train")
        assert record is not None
        told = await made.schedules.describe(record)
        assert told is not None
        assert (told["overlap"], told["skipped_runs"], told["last_skipped_for"]) == ("skip", 2, job.id)
        assert (told["last_run"], told["last_skipped"]) == ("2025-06-15T12:01:00+00:00", "2025-06-15T12:03:00+00:00")
        await made.store.change(job.id, JobStatus.STOPPED)
        await made.submit_due()
        assert await made.runs() == [NOON + 60]  # a skipped run is not made up for
        clock.now = NOON + 240
        await made.submit_due()
        assert await made.runs() == [NOON + 60, NOON + 240]

    play(home, before)
    play(home, after)


def test_stores_a_permanent_error_and_continues_with_the_next_run(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api(submission={"timeout": "soon"}))
        clock.now = NOON + 60
        await made.submit_due()
        record = made.apis.get("train")
        assert record is not None
        told = await made.schedules.describe(record)
        assert told is not None
        assert told["error"].startswith("timeout: must be an integer")
        assert (told["last_run"], told["next_run"]) == (None, "2025-06-15T12:02:00+00:00")
        made.deploy(task_api())
        clock.now = NOON + 120
        await made.submit_due()
        told = await made.schedules.describe(made.apis.get("train") or record)
        assert told is not None
        (job,) = await made.submitted()
        assert (told["error"], told["last_job_id"], told["last_run"]) == ("", job.id, "2025-06-15T12:02:00+00:00")

    play(home, test)


def test_retries_a_temporary_error(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        source = {"items": [1], "batch_size": 1}
        blocked = home.path / "out"
        blocked.write_text("a file where a folder should be")
        submission = {"workers": 1, "item_list": source, "output": f"{blocked}/x"}
        made.deploy(batch_api(submission))
        clock.now = NOON + 60
        await made.submit_due()
        ticks = (await made.store.read(read_schedules))["sum"]
        assert ticks.error and ticks.handled_at == NOON
        blocked.unlink()
        await made.submit_due()
        assert await made.runs("sum") == []  # not before the retry delay
        clock.now += 11
        await made.submit_due()
        assert await made.runs("sum") == [NOON + 60]
        assert (await made.store.read(read_schedules))["sum"].error == ""

    play(home, test)


def test_a_schedule_restarts_after_the_clock_was_set_back(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        made.deploy(task_api())
        clock.now = NOON + 365 * 86400
        await made.submit_due()
        clock.now = NOON
        await made.submit_due()
        clock.now = NOON + 60
        await made.submit_due()
        assert (await made.runs())[-1] == NOON + 60

    play(home, test)


def test_stores_a_large_job_and_its_run_atomically(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        items = {"items": list(range(2500)), "batch_size": 1}
        made.deploy(batch_api({"workers": 1, "item_list": items}))
        clock.now = NOON + 60
        await made.submit_due()
        (job,) = await made.submitted("sum")
        assert job.counts.batches == 2500
        assert (await made.store.read(read_schedules))["sum"].last_job_id == job.id

    play(home, test)


def test_submits_every_run_once_if_the_operator_is_killed_at_any_time(home: Home) -> None:
    command = [
        sys.executable,
        str(TESTS / "harness" / "jobs" / "crashing_schedules.py"),
        str(home.path),
        "7",
        "15",
        "6",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(TESTS)}
    )
    assert done.returncode == 0, done.stderr
    last_look = float(done.stdout) - STEP_S

    async def check(made: ScheduleHarness, _: Clock) -> None:
        first = BEGIN // 60 * 60 + 60
        due = [first + 60 * minute for minute in range(int((last_look - first) // 60) + 1)]
        assert len(due) > 10
        assert await made.runs() == due

    play(home, check)


def batch_api(submission: dict[str, object]) -> Api:
    schedule = {"cron": "* * * * *", "submission": submission}
    handler = {"interface": "handler", "type": "python", "path": "batch.py"}
    return Api.model_validate(
        {"name": "sum", "kind": "BatchAPI", "networking": {}, "handler": handler, "schedule": schedule}
    )


def test_an_unknown_time_zone_stops_no_other_schedule(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        lost = task_api("lost")
        assert lost.schedule is not None
        elsewhere = lost.schedule.model_copy(update={"timezone": "Mars/Olympus"})  # known when it was deployed
        made.deploy(lost.model_copy(update={"schedule": elsewhere}), task_api())
        for clock.now in (NOON, NOON + 60):
            await made.submit_due()
        assert (await made.runs("lost"), await made.runs()) == ([], [NOON + 60])
        unreadable, told = [await made.schedules.describe(record) for record in made.apis.records()]
        assert told is not None and unreadable is not None
        assert told["last_run"] == "2025-06-15T12:01:00+00:00"
        assert unreadable["next_run"] is None
        assert "does not know the time zone Mars/Olympus" in unreadable["error"]

    play(home, test)


def test_time_zones_work_without_a_system_database() -> None:
    command = [sys.executable, "-c", "import zoneinfo; print(zoneinfo.ZoneInfo('Europe/Berlin'))"]
    done = subprocess.run(command, env={**os.environ, "PYTHONTZPATH": ""}, capture_output=True, text=True, check=True)
    assert done.stdout == "Europe/Berlin\n"


def test_a_job_whose_api_is_deleted_while_it_is_stored_is_deleted(home: Home) -> None:
    async def test(made: ScheduleHarness, clock: Clock) -> None:
        go = threading.Event()
        threads = ThreadPoolExecutor(1)
        threads.submit(go.wait)
        asyncio.get_running_loop().set_default_executor(threads)  # used to cut items into batches
        made.deploy(batch_api({"workers": 1, "item_list": {"items": [1], "batch_size": 1}}))
        clock.now = NOON + 60
        (submitting,) = await made.schedules.submit_due()
        for _ in range(10):
            await asyncio.sleep(0)
        made.apis.write([], ["sum"])
        await made.jobs.api_deleted("sum", keep=True)
        go.set()
        await submitting
        assert await made.submitted("sum") == []

    play(home, test)
