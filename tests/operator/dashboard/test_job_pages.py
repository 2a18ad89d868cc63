"""Pages of jobs, rendered from real stores, also with content that is made to break them."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from sqlalchemy import Connection, insert

from cortex.engine.log_writer import STDERR, STDOUT, LogWriter
from cortex.home import Home
from cortex.jobs.records import Presence
from cortex.jobs.spec import BatchFailure, JobRecord, Submission, TaskCall
from cortex.lifecycle import ApiKind, JobStatus, TokenScope
from cortex.state.tables import job_inputs, jobs
from harness.jobs.job_checks import ORIGIN, options
from harness.jobs.job_pages import JobPages, check, visit

HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\ud800\u202e\x00 100% {{ 7*7 }}"


def test_the_list_shows_jobs_of_all_apis_the_newest_first(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("digits")
        first = await pages.submit(b"[1]", b"[2]")
        await pages.fail(first, BatchFailure(0, "ValueError: bad"))
        second = await pages.submit(b"[3]", api="letters")
        page = check(await pages.get("/jobs"))
        assert page.text.index(second.id) < page.text.index(first.id)
        assert "completed with failures" in page.main
        assert "100%" in page.main
        assert f'href="/dashboard/jobs/letters/{second.id}"' in page.text
        for query, shown in {
            "api=letters": [second],
            "status=failed": [first],
            "status=unfinished": [second],
            "status=succeeded": [],
            "api=digits&status=failed": [first],
            "api=nothing": [],
            "status=invented": [first, second],
        }.items():
            text = check(await pages.get(f"/jobs?{query}")).text
            assert [job for job in (first, second) if job.id in text] == shown, query

    visit(home, scenario)


def test_a_list_without_jobs_says_how_to_submit_one(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        assert "cortex submit" in check(await pages.get("/jobs")).main
        assert "No such jobs" in check(await pages.get("/jobs?api=%3Cscript%3E%ff")).main
        for query in ("before=0", "before=x", "before=99999999999999999999"):
            assert (await pages.get(f"/jobs?{query}")).status == 400

    visit(home, scenario)


@pytest.mark.heavy
def test_ten_thousand_jobs_are_shown_in_pages(home: Home) -> None:
    def fill(connection: Connection) -> None:
        numbers = range(1, 10_001)
        inputs = {"origin": json.dumps(asdict(ORIGIN)), "options": json.dumps(asdict(options())), "source": "{}"}
        common = {"api": "digits", "presence": Presence.VISIBLE, "status": JobStatus.PENDING, "created_at": 1e9}
        common |= {"max_attempts": 1, "isolate_failures": False}
        connection.execute(insert(jobs), [{"number": each, "id": f"{each:016x}"} | common for each in numbers])
        connection.execute(insert(job_inputs), [{"number": each} | inputs for each in numbers])

    async def scenario(pages: JobPages) -> None:
        await pages.store.write(fill)
        page = check(await pages.get("/jobs?api=digits&status=unfinished"))
        assert page.text.count("<tr>") == 51
        assert len(page.text) < 100_000
        assert "before=9951" in page.text
        second = check(await pages.get("/jobs?api=digits&status=unfinished&before=9951"))
        assert f"{9950:016x}" in second.text
        assert f"{9951:016x}" not in second.text
        last = check(await pages.get("/jobs?before=51"))
        assert "Newest" in last.main
        assert "Older" not in last.main

    visit(home, scenario)


def test_the_page_of_a_job_shows_progress_workers_and_errors(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        job = await pages.submit(*[b"[1]"] * 6)
        failures = [BatchFailure(seq, f"ValueError: row {seq} is bad", "Traceback") for seq in range(4)]
        await pages.fail(job, *failures, BatchFailure(4, "KeyError: 'x'"))
        page = check(await pages.get(f"/jobs/digits/{job.id}"))
        assert "ValueError: row 0 is bad 4 4" in page.main
        assert "KeyError: &#39;x&#39; 1 1" in page.main
        assert "6 of 6 batches" in page.main
        assert "Stop" not in page.main
        assert "worker_counts" not in page.main
        assert (await pages.get("/jobs/digits/0000000000000000")).status == 404
        assert (await pages.get(f"/jobs/other/{job.id}")).status == 404
        assert (await pages.get("/jobs/digits/..%2f..%2fx/logs")).status == 404

    visit(home, scenario)


@pytest.mark.parametrize("path", ["", "/dead-letters", "/logs", "/submission"])
def test_hostile_texts_are_shown_as_texts(home: Home, path: str) -> None:
    async def scenario(pages: JobPages) -> None:
        text = HOSTILE.replace("\ud800", "").replace("\x00", "")  # a database of jobs has neither
        config = {HOSTILE: HOSTILE, "api_key": "swordfish", "url": "redis://u:swordfish@host/0"}
        source = {"kind": "upload", "batch_size": 1, "paths": ["s3://u:swordfish@b/"]}
        webhook = "https://hooks.example.org/swordfish"
        payload = json.dumps([{"text": HOSTILE, "token": "swordfish", HOSTILE: 1}]).encode()
        job = await pages.submit(payload, config=config, webhook=webhook, source=source)
        await pages.fail(job, BatchFailure(0, f"{text} redis://u:swordfish@host", text))
        other = await pages.submit(b"[1]")
        secret = " redis://u:swordfish@host"
        await pages.store.change(other.id, JobStatus.WORKER_ERROR, text + secret, text * 1000 + secret)
        for each in (job, other):
            write_logs(home, each, HOSTILE.encode(errors="surrogatepass") + b"\xff\xfe")
            page = check(await pages.get(f"/jobs/digits/{each.id}{path}"))
            assert "&lt;script&gt;" in page.text or (each is other and path in ("/submission", "/dead-letters")), (
                page.main
            )
        check(await pages.get("/jobs"))

    visit(home, scenario)


def write_logs(home: Home, job: JobRecord, line: bytes) -> None:
    writer = LogWriter(home.logs_dir / job.origin.api / job.id / "worker-1.log")
    writer.feed(1, STDOUT, line + b"\n")
    writer.feed(1, STDERR, line + b"\n")
    writer.close()


def test_a_job_is_stopped_once(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        job = await pages.submit(b"[1]")
        path = f"/jobs/digits/{job.id}"
        assert f'action="/dashboard{path}/stop"' in check(await pages.get(path)).text
        answer = await pages.post(f"{path}/stop")
        assert (answer.status, answer.location) == (303, f"/dashboard{path}")
        page = check(await pages.get(path))
        assert f"stopped job {job.id}" in page.main
        assert "stopped by its user" in page.main
        assert f'action="/dashboard{path}/stop"' not in page.text
        again = await pages.post(f"{path}/stop")
        assert (again.status, "already been stopped" in again.text) == (409, True)

    visit(home, scenario)


def test_a_token_sees_and_stops_only_what_it_permits(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        job, other = await pages.submit(b"[1]"), await pages.submit(b"[1]", api="letters")
        pages.sign_in(TokenScope.READ)
        assert "/stop" not in check(await pages.get(f"/jobs/digits/{job.id}")).text
        assert (await pages.post(f"/jobs/digits/{job.id}/stop")).status == 403
        pages.sign_in(TokenScope.DEPLOY, "letters")
        for query in ("", "?api=digits"):
            text = check(await pages.get(f"/jobs{query}")).text
            assert (other.id in text, job.id in text, "digits" in text) == (True, False, False)
        assert (await pages.get(f"/jobs/digits/{job.id}")).status == 403
        assert (await pages.post(f"/jobs/digits/{job.id}/stop")).status == 403
        assert (await pages.post(f"/jobs/letters/{other.id}/stop")).status == 303

    visit(home, scenario)


def test_a_task_has_no_batches(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("train", ApiKind.TASK)
        task = await pages.jobs.submit("train", Submission(TaskCall(), options()), is_trusted=True)
        await pages.store.change(task.id, JobStatus.WORKER_ERROR, "ValueError: bad", "Traceback")
        assert "one call" in check(await pages.get("/jobs")).main
        page = check(await pages.get(f"/jobs/train/{task.id}"))
        assert "ValueError: bad" in page.main
        assert "batches" not in page.main
        check(await pages.get(f"/jobs/train/{task.id}/submission"))
        assert f'action="/dashboard/jobs/train/{task.id}/retry"' in page.text
        assert (await pages.post(f"/jobs/train/{task.id}/retry")).status == 303
        page = check(await pages.get(f"/jobs/train/{task.id}"))
        assert "the task" in page.main

    visit(home, scenario)


def test_dead_letters_are_shown_in_pages(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("digits")
        job = await pages.submit(*(b"[%d]" % number for number in range(50)))
        await pages.fail(job, *(BatchFailure(seq, f"ValueError: bad {seq}", f"line {seq}") for seq in range(0, 50, 2)))
        first = check(await pages.get(f"/jobs/digits/{job.id}/dead-letters"))
        assert "Batch 38 item 39 of the input 1 attempt" in first.main
        assert "Batch 40" not in first.main
        assert "ValueError: bad 38" in first.main
        assert "line 38" in first.main
        second = check(await pages.get(f"/jobs/digits/{job.id}/dead-letters?after=38"))
        assert "Batch 48" in second.main
        assert "Next" not in second.main
        assert "No further" in check(await pages.get(f"/jobs/digits/{job.id}/dead-letters?after=999")).main

    visit(home, scenario)


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b'[{"password": "swordfish", "text": "a\\ud800b"}]', "********"),
        (b"[" * 5000 + b"]" * 5000, "too large for this page"),
        (b"[%s]" % (b"9" * 5000), "too large for this page"),
        (b'["\xff\xfe"]', "too large for this page"),
        (b'["%s"]' % (b"x" * 300_000), "too large for this page"),
        (b'["%s"]' % (b"x" * 30_000), "The rest is not shown"),
    ],
)
def test_payloads_are_masked_and_bounded(home: Home, payload: bytes, shown: str) -> None:
    async def scenario(pages: JobPages) -> None:
        job = await pages.submit(payload)
        text = "e" * 50_000 + " redis://u:swordfish@host"
        await pages.fail(job, BatchFailure(0, text, text))
        page = check(await pages.get(f"/jobs/digits/{job.id}/dead-letters"))
        assert shown in page.main
        assert len(page.text) < 40_000

    visit(home, scenario)


def test_one_dead_letter_or_all_are_retried(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        pages.deploy("digits")
        job = await pages.submit(b"[1]", b"[2]", b"[3]")
        path = f"/jobs/digits/{job.id}"
        assert (await pages.post(f"{path}/retry")).status == 409
        await pages.fail(job, BatchFailure(0, "ValueError: a"), BatchFailure(2, "ValueError: c"))
        one = await pages.post(f"{path}/retry", seq="2")
        assert one.status == 303
        retried = (await pages.jobs.list("digits"))[0].record
        assert (retried.counts.batches, retried.source) == (1, {"kind": "retry_of", "retry_of": job.id, "seq": 2})
        leased = await pages.store.lease(retried.id, "w", 1, [], 10, 2**20)
        assert leased.lease is not None
        assert [batch.payload for batch in leased.lease.batches] == [b"[3]"]
        page = check(await pages.get(one.location.removeprefix("/dashboard")))
        assert f"submitted as a retry of batch 2 of {job.id}" in page.main
        assert f'Retry of <a href="/dashboard{path}">' in page.text
        letters = check(await pages.get(f"{path}/dead-letters"))
        assert letters.main.count("in the retry") == 1
        assert (await pages.post(f"{path}/retry")).status == 303
        assert check(await pages.get(f"{path}/dead-letters")).main.count("in the retry") == 3
        assert "all dead letters" in check(await pages.get(path)).main
        for seq, status in {"1": 404, "99": 404, "x": 400, "-1": 400, "٣": 400, "9" * 20: 400}.items():
            assert (await pages.post(f"{path}/retry", seq=seq)).status == status, seq
        assert len(await pages.jobs.list("digits", 100)) == 3

    visit(home, scenario)


def test_jobs_of_a_deleted_api_can_be_read_but_not_retried(home: Home) -> None:
    async def scenario(pages: JobPages) -> None:
        job = await pages.submit(b"[1]")
        await pages.fail(job, BatchFailure(0, "ValueError: a"))
        for path in ("", "/dead-letters", "/logs", "/submission"):
            assert "/retry" not in check(await pages.get(f"/jobs/digits/{job.id}{path}")).text
        assert (await pages.post(f"/jobs/digits/{job.id}/retry")).status == 404

    visit(home, scenario)
