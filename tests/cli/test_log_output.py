"""The printed lines of all log files of a home."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from cortex.cli.log_output import LogFiles, LogOutput
from cortex.engine.log_writer import STDERR, STDOUT, SUPERVISOR, LogWriter
from harness.wait import wait_until

OPERATOR = '2026-11-22T20:32:04.116Z info replica started api=iris reason="a b"\n'


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def messages(files: LogFiles) -> list[str]:
    return [line["message"] for line in files.poll()]


def test_lines_of_each_source_have_its_fields(tmp_path: Path) -> None:
    files = LogFiles(tmp_path)
    append(tmp_path / "operator.log", OPERATOR + "error: no port\n")
    append(tmp_path / "gateway.log", "[ALERT]    (12) : config : broken\n")
    append(tmp_path / "access.log", '{"time": "2026-11-22T20:32:05.000Z", "api": "iris", "status": 200}\n')
    (tmp_path / "iris" / "69da5b1f").mkdir(parents=True)
    replica = LogWriter(tmp_path / "iris" / "iris-1a2b-3c4d.log")
    replica.line(1, STDOUT, "INFO hello")
    replica.line(0, SUPERVISOR, "process 7 started")
    LogWriter(tmp_path / "iris" / "69da5b1f" / "iris-job.log").line(0, STDERR, "oops")
    lines = files.poll()
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    of = {line["message"] if "message" in line else line["status"]: line for line in lines}
    assert of["replica started"] == {
        "time": "2026-11-22T20:32:04.116Z", "source": "operator", "level": "info", "message": "replica started",
        "api": "iris", "reason": "a b",
    }  # fmt: skip
    assert (of["no port"]["source"], of["no port"]["level"]) == ("operator", "error")
    assert (of["config : broken"]["source"], of["config : broken"]["level"]) == ("gateway", "error")
    assert of[200].items() >= {"source": "access", "api": "iris", "time": "2026-11-22T20:32:05.000Z"}.items()
    expected = {"source": "replica", "level": "info", "api": "iris", "replica": "iris-1a2b-3c4d", "stream": "stdout"}
    assert of["hello"].items() >= expected.items()
    assert of["oops"].items() >= {"source": "replica", "api": "iris", "job": "69da5b1f", "stream": "stderr"}.items()
    assert files.poll() == []


def test_carriage_returns_begin_no_line_of_another_process(tmp_path: Path) -> None:
    (tmp_path / "iris").mkdir()
    files = LogFiles(tmp_path)
    replica = LogWriter(tmp_path / "iris" / "iris-1a2b-3c4d.log")
    replica.line(1, STDOUT, "hello\r2026-11-22T20:32:04.116000Z 0 s process 7 killed")
    (line,) = files.poll()
    assert (line["stream"], line["message"][:5]) == ("stdout", "hello")


def test_only_complete_new_lines_are_printed(tmp_path: Path) -> None:
    append(tmp_path / "operator.log", OPERATOR)
    files = LogFiles(tmp_path)
    append(tmp_path / "operator.log", OPERATOR.replace("started", "ended")[:-5])
    assert messages(files) == []
    append(tmp_path / "operator.log", OPERATOR[-5:])
    assert messages(files) == ["replica ended"]


def test_no_line_is_lost_or_repeated_in_a_rotation(tmp_path: Path) -> None:
    files = LogFiles(tmp_path)
    log = LogWriter(tmp_path / "iris" / "iris-1-2.log", max_bytes=500, backups=3)
    (tmp_path / "iris").mkdir()
    seen = []
    for number in range(60):
        log.line(0, STDOUT, f"line {number}")
        if number % 7 == 0:
            seen += messages(files)
    seen += messages(files)
    assert seen == [f"line {number}" for number in range(60)]
    assert (tmp_path / "iris" / "iris-1-2.log.1").exists()


def test_a_log_that_is_copied_and_truncated_is_not_repeated(tmp_path: Path) -> None:
    files, log = LogFiles(tmp_path), tmp_path / "gateway.log"
    append(log, "[NOTICE]   (1) : one\n[NOTICE]   (1) : two\n")
    assert messages(files) == ["one", "two"]
    shutil.copyfile(log, tmp_path / "gateway.log.1")
    log.write_text("")
    assert messages(files) == []
    append(log, "[NOTICE]   (1) : three\n")
    assert messages(files) == ["three"]


@pytest.mark.parametrize("is_json", [True, False])
def test_lines_are_printed_until_the_end(tmp_path: Path, is_json: bool) -> None:
    stream = io.StringIO()
    output = LogOutput(tmp_path, stream, is_json)
    output.start()
    append(tmp_path / "operator.log", OPERATOR)
    wait_until(lambda: stream.getvalue())
    append(tmp_path / "iris" / "iris-1a2b-3c4d.log", "2026-11-22T20:32:05.000000Z 0 s process 7 started\n")
    output.write("info", "stopped", code=0)
    output.stop()
    lines = stream.getvalue().splitlines()
    if is_json:
        assert [json.loads(line)["source"] for line in lines] == ["operator", "replica", "up"]
    else:
        assert lines[0] == "2026-11-22T20:32:04.116Z operator info replica started api=iris reason=a b"
        assert lines[1] == "2026-11-22T20:32:05.000000Z iris/3c4d process 7 started"
        assert lines[2].endswith(" up info stopped code=0")


def test_a_reader_that_has_ended_stops_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    stream.close()
    output = LogOutput(tmp_path, stream, is_json=True)
    output.start()
    append(tmp_path / "operator.log", OPERATOR)
    output.stop()
