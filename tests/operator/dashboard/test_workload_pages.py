"""Pages of workloads and of schedules, rendered from real stores."""

from __future__ import annotations

import json
import re
import uuid

import pytest
from sqlalchemy import Connection, insert, select

from cortex.home import Home
from cortex.lifecycle import ApiKind, JobStatus, TokenScope, WorkloadStatus
from cortex.state.tables import first_key, jobs, workloads
from harness.jobs.job_pages import JobPages, check, visit

HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\u202e redis://u:swordfish@host"


def test_queues_show_what_waits_and_since_when(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        assert "No AsyncAPIs" in check(await pages.get("/workloads")).main
        for name in ("greet", "unused"):
            pages.deploy(name, ApiKind.ASYNC)
        await pages.send("greet", *[b"{}"] * 5)
        await pages.process("greet", b"1", b"")
        page = check(await pages.get("/workloads"))
        assert re.search(r"greet 3 \d+ \w+ ago 1", page.main)
        assert "unused 0 none waits 0" in page.main
        pages.sign_in(TokenScope.READ, "unused")
        assert "greet" not in check(await pages.get("/workloads")).main
        assert (await pages.get("/workloads/greet")).status == 403

    visit(home, scenario)


def test_the_latest_workloads_are_listed_by_status(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("greet", ApiKind.ASYNC)
        assert "No workloads" in check(await pages.get("/workloads/greet")).main
        completed, failed, leased, waiting = await pages.send("greet", b"1", b"2", b"3", b"4")
        await pages.process("greet", b"1", HOSTILE, b"")
        by_status = dict(
            zip(("completed", "failed", "in_progress", "in_queue"), (completed, failed, leased, waiting), strict=True)
        )
        for status, expected in by_status.items():
            text = check(await pages.get(f"/workloads/greet?status={status}")).text
            assert [each for each in by_status.values() if str(each) in text] == [expected]
        page = check(await pages.get("/workloads/greet?status=invented"))
        assert page.text.index(str(waiting)) < page.text.index(str(completed))
        assert "&lt;script&gt;" in page.text
        assert (await pages.get("/workloads/nothing")).status == 404

    visit(home, scenario)


def test_a_workload_is_found_by_its_id(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("greet", ApiKind.ASYNC)
        ids = await pages.send("greet", *[b"{}"] * 4)
        result = json.dumps({"text": HOSTILE, "token": "swordfish"}).encode()
        await pages.process("greet", result, HOSTILE, b"")
        for each, shown in zip(ids, ("Result", "Error", "being processed", "waits in the queue"), strict=True):
            found = await pages.get(f"/workloads/greet?id=%20{each}")
            assert (found.status, found.location) == (303, f"/dashboard/workloads/greet/{each}")
            page = check(await pages.get(f"/workloads/greet/{each}"))
            assert shown in page.main
            assert ("&lt;script&gt;" in page.text) == (shown in ("Result", "Error"))
        for unknown in ("?id=x", f"/{uuid.uuid4()}", "/x", "?id=%3Cscript%3E%ff"):
            assert (await pages.get(f"/workloads/greet{unknown}")).status == 404

    visit(home, scenario)


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (b'"\\ud800"', "Result 8 B"),
        (b'"\xff"', "not JSON"),
        (b'"%s"' % (b"x" * 50_000), "The rest is not shown"),
        (b'"%s"' % (b"x" * 500_000), "too large"),
        (b"[" * 4000 + b"]" * 4000, "too large"),
    ],
    ids=["half a character", "not UTF-8", "long", "large", "deep"],
)
def test_results_are_bounded(home: Home, result: bytes, shown: str) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("greet", ApiKind.ASYNC)
        (name,) = await pages.send("greet", b"{}")
        await pages.process("greet", result)
        page = check(await pages.get(f"/workloads/greet/{name}"))
        assert shown in page.main
        assert len(page.text) < 40_000

    visit(home, scenario)


@pytest.mark.heavy
def test_a_list_of_many_workloads_is_bounded(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("greet", ApiKind.ASYNC)
        await pages.send("greet", b"{}")
        await pages.process("greet", b"1")

        def fill(connection: Connection) -> None:
            number = connection.execute(select(jobs.c.number).where(jobs.c.api == "greet")).scalar_one()
            common = {"created_at": 1e9, "ended_at": 1e9, "status": WorkloadStatus.FAILED, "value": b"e" * 5_000}
            keys = range(first_key(number) + 1, first_key(number) + 10_001)
            connection.execute(insert(workloads), [{"key": key, "id": key.to_bytes(16)} | common for key in keys])

        await pages.store.write(fill)
        for query in ("", "?status=failed"):
            page = check(await pages.get(f"/workloads/greet{query}"))
            assert page.text.count("<tr>") == 101
            assert "The latest 100" in page.main
            assert len(page.text) < 150_000
        assert "None of the latest" in check(await pages.get("/workloads/greet?status=completed")).main  # it is older

    visit(home, scenario)


def test_schedules_show_their_next_and_last_run(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        assert "No schedules" in check(await pages.get("/schedules")).main
        pages.deploy(
            "train", ApiKind.TASK, schedule={"cron": "0 3 * * *", "timezone": "Europe/Berlin", "overlap": "skip"}
        )
        pages.deploy("digits")
        await pages.harness.submit_due()
        page = check(await pages.get("/schedules"))
        assert "train TaskAPI 0 3 * * * Europe/Berlin, skips while a run is not over in" in page.main
        assert "none yet Run now" in page.main
        assert "digits" not in page.main
        pages.sign_in(TokenScope.READ)
        assert "/run" not in check(await pages.get("/schedules")).text
        assert (await pages.post("/schedules/train/run")).status == 403
        pages.sign_in(TokenScope.DEPLOY, "digits")
        assert "train" not in check(await pages.get("/schedules")).main
        assert (await pages.post("/schedules/train/run")).status == 403

    visit(home, scenario)


def test_a_schedule_is_run_now(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        submission = {"config": {"a": 1}}
        pages.deploy("train", ApiKind.TASK, schedule={"cron": "0 3 * * *", "overlap": "skip", "submission": submission})
        pages.deploy("digits")
        await pages.harness.submit_due()
        answer = await pages.post("/schedules/train/run")
        (view,) = await pages.jobs.list("train")
        assert view.record.options.config == {"a": 1}
        assert (answer.status, answer.location) == (303, f"/dashboard/jobs/train/{view.record.id}")
        assert "submitted the job of the schedule" in check(await pages.get(f"/jobs/train/{view.record.id}")).main
        again = await pages.post("/schedules/train/run")
        assert (again.status, view.record.id in again.text) == (409, True)
        await pages.store.change(view.record.id, JobStatus.WORKER_ERROR, HOSTILE)
        page = check(await pages.get("/schedules"))
        assert re.search(rf"worker error \d+ \w+ ago job {view.record.id}", page.main)
        assert (await pages.post("/schedules/train/run")).status == 303
        for unknown, status in {"nothing": 404, "digits": 400}.items():
            assert (await pages.post(f"/schedules/{unknown}/run")).status == status

    visit(home, scenario)


def test_the_job_of_the_last_run_may_be_deleted(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("train", ApiKind.TASK, schedule={"cron": "0 3 * * *"})
        await pages.harness.submit_due()
        await pages.post("/schedules/train/run")
        (view,) = await pages.jobs.list("train")
        await pages.store.delete_job(view.record.id)
        assert f"job {view.record.id} is deleted" in check(await pages.get("/schedules")).main

    visit(home, scenario)
