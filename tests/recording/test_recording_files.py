"""Files of a recording: in which order they are read, and what a killed process leaves behind."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import InputError
from cortex.recording import files
from cortex.recording.exchange import encode_head
from cortex.recording.files import Recording

START = 1_795_444_400.0


def line(number: int, ended_s: float) -> bytes:
    time = datetime.fromtimestamp(START + ended_s, UTC).isoformat()
    return (
        b'{"id":"%d","time":"%b","duration_ms":0,"method":"GET","path":"","query":"","headers":[],"request":{},'
        b'"status":200,"response":{}}\n' % (number, time.encode())
    )


def write(folder: Path, name: str, started_s: float, ended: list[float], api: str = "iris", rest: bytes = b"") -> None:
    folder.mkdir(exist_ok=True)
    head = encode_head(api=api, started=datetime.fromtimestamp(START + started_s, UTC))
    lines = [line(number, ended_s) for number, ended_s in enumerate(ended)]
    (folder / f"{name}.ndjson").write_bytes(head + b"".join(lines) + rest)


def ended(recording: Recording) -> list[float]:
    return [round(each.started_s - START, 3) for each in recording.exchanges()]


def test_the_files_of_several_processes_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    write(tmp_path, "a-1", 0, [1, 4, 9])
    write(tmp_path, "a-2", 9, [10, 12])
    write(tmp_path, "b-1", 2, [3, 5, 11])
    assert ended(Recording.open(tmp_path)) == [1, 3, 4, 5, 9, 10, 11, 12]


@given(st.lists(st.tuples(st.integers(0, 50), st.lists(st.integers(0, 20), max_size=5)), max_size=6))
def test_every_exchange_is_read_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("recording")
    expected = []
    for number, (started, steps) in enumerate(written):
        times = [float(time) for time in itertools.accumulate(steps, initial=started)][1:]
        write(folder, f"{number}", started, times)
        expected += times
    if written:
        assert ended(Recording.open(folder)) == sorted(expected)


def test_an_unfinished_last_line_and_an_empty_file_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a", 0, [1, 2], rest=b'{"id":"cut')
    (tmp_path / "b.ndjson").write_bytes(b"")
    (tmp_path / "c.ndjson").write_bytes(b'{"cortex_recor')
    recording = Recording.open(tmp_path)
    assert (ended(recording), recording.empty) == ([1, 2], 2)
    assert [file.has_unfinished_line() for file in recording.files] == [True]


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    write(tmp_path, "a", 0, [1], rest=b'{"id":"cut\n' + line(2, 2))
    with pytest.raises(InputError, match=r"a\.ndjson:3: this line of the recording is damaged: it is not JSON"):
        ended(Recording.open(tmp_path))


def test_the_files_of_one_api_are_chosen(tmp_path: Path) -> None:
    write(tmp_path / "iris", "a", 0, [1])
    write(tmp_path / "text", "b", 0, [2], api="text")
    recording = Recording.open(tmp_path)
    assert recording.apis == ["iris", "text"]
    assert ended(recording.of("text")) == [2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.csv", b"a,b\n1,2\n", "data.csv:1: this line of the recording is damaged: it is not JSON"),
        ("data.ndjson", b'{"a": 1}\n', "data.ndjson:1: not a recording"),
        ("data.ndjson", b'{"cortex_recording": 1}\n', 'data.ndjson:1: .* has no valid "started"'),
        ("data.ndjson", b'{"cortex_recording": 9}\n', "data.ndjson:1: this recording has format 9"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        Recording.open(tmp_path / name)


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read: no such file or directory"):
        Recording.open(tmp_path / "missing")
    with pytest.raises(InputError, match="this folder has no recording"):
        Recording.open(tmp_path)


def test_a_line_that_no_process_writes_is_an_error_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    write(tmp_path, "a", 0, [1], rest=b"x" * 1000 + b"\n")
    with pytest.raises(InputError, match=r"a\.ndjson:3: this line of the recording is damaged: it is longer than"):
        ended(Recording.open(tmp_path))
