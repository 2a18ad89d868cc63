from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cortex.engine.log_writer import LogWriter
from cortex.engine.logs import LocalLogs
from cortex.gateway.access_log import ACCESS_LOG_FILE as ACCESS_LOG
from cortex.gateway.access_log import LocalAccess
from cortex.operator.http.log_format import LogForm
from cortex.operator.http.log_streams import stream_access_log, stream_logs
from cortex.worker.monitoring.request_log import END, MARK
from harness.replicas.replicas import new_request_id, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes


async def read(response: object) -> list[str]:
    return "".join([part async for part in response.body_iterator]).splitlines()  # type: ignore[attr-defined]


def logs(folder: Path, form: LogForm, tail: int = 1000) -> list[str]:
    return asyncio.run(read(stream_logs([LocalLogs(folder.parent)], folder.name, None, False, tail, form=form)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = LogWriter(tmp_path / "iris" / "iris-aaaaaaaa-000001.log")
    writer.line(0, "s", "process 7 killed (SIGKILL)")
    writer.feed(1, "o", f"{MARK}170-1{END}WARNING careful n=3\n{MARK}170-2{END}INFO of another\n".encode())
    writer.feed(1, "e", f"größe\n{MARK}170-1{END}ERROR on standard error\n".encode())
    writer.close()
    return tmp_path / "iris"


def test_json_lines_have_their_origin_and_request(folder: Path) -> None:
    lines = [json.loads(line) for line in logs(folder, LogForm(is_json=True))]
    times = [line.pop("time") for line in lines]
    assert times == sorted(times) and all(len(moment) == 27 for moment in times)
    replica = "iris-aaaaaaaa-000001"
    printed = {"replica": replica, "process": 1}
    assert lines == [
        {"replica": replica, "process": 0, "stream": "supervisor", "message": "process 7 killed (SIGKILL)"},
        {**printed, "stream": "stdout", "level": "warning", "message": "careful n=3", "request_id": "170-1"},
        {**printed, "stream": "stdout", "level": "info", "message": "of another", "request_id": "170-2"},
        {**printed, "stream": "stderr", "message": "größe"},
        {**printed, "stream": "stderr", "message": "ERROR on standard error", "request_id": "170-1"},
    ]


def test_filters_by_request_before_tail_applies(folder: Path) -> None:
    of_request = [line.split(" ", 2)[1:] for line in logs(folder, LogForm(request="170-1"))]
    assert of_request == [["000001", "WARNING careful n=3"], ["000001", "ERROR on standard error"]]
    assert len(logs(folder, LogForm(request="170-1"), tail=1)) == 1
    assert logs(folder, LogForm(request="170-9")) == []


def test_text_shows_the_last_state_of_a_progress_bar_and_json_all(folder: Path) -> None:
    writer = LogWriter(folder / "iris-aaaaaaaa-000002.log")
    writer.line(1, "e", "  0%|  |\r 50%|# |\r100%|##|")
    writer.close()
    assert logs(folder, LogForm(), tail=1)[0].split(" ", 1)[1] == "000002 100%|##|"
    assert json.loads(logs(folder, LogForm(is_json=True), tail=1)[0])["message"].startswith("  0%|  |\r 50%")


def test_finds_a_death_by_each_request_inside_the_process(folder: Path) -> None:
    writer = LogWriter(folder / "iris-aaaaaaaa-000002.log")
    died = "process 9 segmentation fault (SIGSEGV), inside: request 170-1, 170-3"
    writer.line(0, "s", died)
    writer.feed(1, "o", b"process 9 killed (SIGKILL), inside: request 170-4\n")  # printed by user code: not a death
    writer.line(0, "s", "process 11 killed (SIGKILL), inside: workload 8a5f")
    writer.close()

    def of(request: str) -> list[str]:
        return [line.split(" ", 2)[2] for line in logs(folder, LogForm(request=request))]

    assert of("170-1") == ["WARNING careful n=3", "ERROR on standard error", died]
    assert of("170-3") == [died]
    assert of("8a5f") == ["process 11 killed (SIGKILL), inside: workload 8a5f"]
    assert of("170-4") == of("70-1") == of("170-1, 170-3") == of("request") == []


@pytest.mark.processes
def test_finds_the_death_of_a_real_process_by_its_request() -> None:
    handler = """
        import ctypes

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                ctypes.string_at(0)
    """
    with running_replica(handler) as replica:
        pid = replica.wait_ready().processes[0].pid
        request_id = new_request_id()
        assert replica.request({}, request_id=request_id).status == 500
        log_dir = Path(replica.spec.log_path).parent
        lines = wait_until(lambda: logs(log_dir, LogForm(is_json=True, request=request_id)))  # written after the answer
        found = [json.loads(line) for line in lines]

    message = f"process {pid} segmentation fault (SIGSEGV), inside: request {request_id}"
    assert [(line["stream"], line["message"]) for line in found] == [("supervisor", message)]


def entry(api: str, number: int) -> str:
    fields = {
        "time": f"t{number}",
        "request_id": f"id-{number}",
        "api": api,
        "method": "POST",
        "path": "/x",
        "status": 200,
    }
    return json.dumps(fields) + "\n"


def test_reads_the_access_log_across_its_files(tmp_path: Path) -> None:
    (tmp_path / f"{ACCESS_LOG}.1").write_text(entry("iris", 1) + entry("other", 2) + "cut off {iris\n")
    (tmp_path / ACCESS_LOG).write_text(entry("iris", 3) + entry("iris-two", 4) + entry("iris", 5))

    def access(request: str | None = None, tail: int = 10, is_json: bool = False) -> list[str]:
        return asyncio.run(read(stream_access_log([LocalAccess(tmp_path)], "iris", request, False, tail, is_json)))

    assert access() == [f"t{number} 200 POST /x request_id=id-{number}" for number in (1, 3, 5)]
    assert access(tail=1) == ["t5 200 POST /x request_id=id-5"]
    assert [json.loads(line)["time"] for line in access("id-3", is_json=True)] == ["t3"]
    nothing = LocalAccess(tmp_path / "none")
    assert asyncio.run(read(stream_access_log([nothing, nothing], "iris", None, False, 10, False))) == []


def test_follows_the_access_log_across_truncation(tmp_path: Path) -> None:
    path = tmp_path / ACCESS_LOG

    async def follow() -> list[str]:
        lines = stream_access_log([LocalAccess(tmp_path)], "iris", None, True, 1, False).body_iterator
        path.write_text(entry("iris", 1) + entry("iris", 2))
        found = [await anext(lines)]
        with path.open("a") as file:
            file.write(entry("iris", 3) + entry("iris", 4)[:20])
        found.append(await anext(lines))
        with path.open("a") as file:
            file.write(entry("iris", 4)[20:])
        (tmp_path / f"{ACCESS_LOG}.1").write_bytes(path.read_bytes())
        path.write_text(entry("iris", 5))
        found += [await anext(lines), await anext(lines)]
        await lines.aclose()  # type: ignore[attr-defined]
        return [line.split(" ")[0] for line in found]

    assert asyncio.run(follow()) == ["t2", "t3", "t4", "t5"]
