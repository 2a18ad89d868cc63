from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.engine.log_writer import MAX_LINE_BYTES, LogWriter
from cortex.engine.logs import LogFollower, prune, read_logs
from harness.wait import wait_until


def texts(api_dir: Path, **options: object) -> list[str]:
    return [line.text for line in read_logs(api_dir, **options)]  # type: ignore[arg-type]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    writer = LogWriter(tmp_path / "api" / "r1.log", max_bytes=2000, backups=3)
    yield writer
    writer.close()


def test_a_line_contains_time_process_and_stream(tmp_path: Path, writer: LogWriter) -> None:
    before = datetime.now(UTC)
    writer.feed(2, "e", b"oh no\n")
    [line] = read_logs(tmp_path / "api")
    assert (line.replica, line.process, line.stream, line.text) == ("r1", 2, "e", "oh no")
    assert before <= line.time <= datetime.now(UTC)
    assert (tmp_path / "api" / "r1.log").read_text() == f"{line.at} 2 e oh no\n"


def test_incomplete_lines_wait_for_their_rest_per_process_and_stream(tmp_path: Path, writer: LogWriter) -> None:
    writer.feed(0, "o", b"one ")
    writer.feed(1, "o", b"other")
    writer.feed(0, "e", b"error\n")
    writer.feed(0, "o", b"line\r\nnext")
    assert texts(tmp_path / "api") == ["error", "one line"]
    writer.flush(0)
    assert texts(tmp_path / "api") == ["error", "one line", "next"]
    writer.close()
    assert texts(tmp_path / "api") == ["error", "one line", "next", "other"]


def test_text_with_line_breaks_becomes_several_lines(tmp_path: Path, writer: LogWriter) -> None:
    writer.line(0, "s", "restarting\nfor the 2nd time \udcff")
    assert texts(tmp_path / "api") == ["restarting", "for the 2nd time \\udcff"]


def test_a_long_line_is_split_without_delay(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "r.log")
    for _ in range(2 * MAX_LINE_BYTES // 1000):
        writer.feed(0, "o", b"x" * 1000)
    found = texts(tmp_path)
    assert found and all(len(text) <= MAX_LINE_BYTES for text in found)
    writer.close()
    assert "".join(texts(tmp_path)) == "x" * (2 * MAX_LINE_BYTES // 1000 * 1000)


@given(
    pieces=st.lists(
        st.one_of(st.binary(max_size=40), st.just(b"\n"), st.just(b"x" * (MAX_LINE_BYTES + 7))), max_size=20
    )
)
def test_no_byte_is_lost_for_any_chunks(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("logs")
    writer = LogWriter(folder / "r.log")
    for piece in pieces:
        writer.feed(0, "o", piece.replace(b"\r", b""))
    writer.close()
    written = (folder / "r.log").read_bytes() if (folder / "r.log").exists() else b""
    joined = b"".join(line.split(b" ", 3)[3] for line in written.split(b"\n") if line)
    assert joined == b"".join(pieces).replace(b"\r", b"").replace(b"\n", b"")


def test_rotation_bounds_the_files_and_keeps_the_newest_lines(tmp_path: Path, writer: LogWriter) -> None:
    for number in range(500):
        writer.feed(0, "o", b"line %d\n" % number)
    files = list((tmp_path / "api").iterdir())
    assert sorted(file.name for file in files) == ["r1.log", "r1.log.1", "r1.log.2", "r1.log.3"]
    assert all(file.stat().st_size <= 2000 for file in files)
    found = texts(tmp_path / "api")
    assert found == [f"line {number}" for number in range(500 - len(found), 500)]


def test_no_backups_still_bounds_the_file(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "r.log", max_bytes=500, backups=0)
    for number in range(100):
        writer.feed(0, "o", b"line %d\n" % number)
    assert (tmp_path / "r.log").stat().st_size <= 500
    assert texts(tmp_path)[-1] == "line 99"


def test_a_second_writer_continues_after_a_torn_line(tmp_path: Path) -> None:
    first = LogWriter(tmp_path / "r.log")
    first.line(0, "o", "one")
    first.close()
    with (tmp_path / "r.log").open("ab") as file:
        file.write(b"2020-01-01T00:00:00.000000Z 0 o cut o")
    LogWriter(tmp_path / "r.log").line(0, "o", "two")
    assert texts(tmp_path) == ["one", "cut o", "two"]


def test_a_full_disk_drops_lines_and_logs_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter(tmp_path / "r.log")
    write, free = os.write, [10_000]

    def full_disk(file: int, data: bytes) -> int:
        if not free[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(file, bytes(data)[: free[0]])
        free[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", full_disk)
    writer.line(0, "o", "before")
    free[0] = 35
    writer.line(0, "o", "cut in the middle")
    writer.feed(0, "o", b"lost\nlost\n")
    free[0] = 10_000
    writer.line(0, "o", "after")
    writer.line(0, "o", "later")
    assert texts(tmp_path) == [
        "before",
        "cut",
        "3 log lines were dropped: No space left on device",
        "after",
        "later",
    ]


def test_a_folder_that_cannot_be_created_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "api").write_text("a file is in the way")
    writer = LogWriter(tmp_path / "api" / "r.log")
    writer.line(0, "o", "lost")
    writer.close()


def test_a_clock_that_goes_back_does_not_break_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([2_000_000_000, 1_000_000_000, 3_000_000_000])
    monkeypatch.setattr("cortex.engine.log_writer.time.time_ns", lambda: next(ticks))
    writer = LogWriter(tmp_path / "r.log")
    for text in "abc":
        writer.line(0, "o", text)
    assert [line.at for line in read_logs(tmp_path)] == [
        "1970-01-01T00:00:02.000000Z",
        "1970-01-01T00:00:02.000000Z",
        "1970-01-01T00:00:03.000000Z",
    ]


def write_history(folder: Path) -> None:
    """Write the numbers 0…299 alternately to the rotating logs of three replicas."""
    folder.mkdir()
    writers = [LogWriter(folder / f"r{number}.log", max_bytes=1500, backups=9) for number in range(3)]
    for number in range(300):
        writers[number % 3].line(0, "o", str(number))
    for writer in writers:
        writer.close()


def test_replicas_are_merged_by_time(tmp_path: Path) -> None:
    write_history(tmp_path / "api")
    assert texts(tmp_path / "api") == [str(number) for number in range(300)]
    assert texts(tmp_path / "api", replica="r1") == [str(number) for number in range(1, 300, 3)]
    assert texts(tmp_path / "api", replica="none") == []
    assert texts(tmp_path / "no such api") == []


@pytest.mark.parametrize("tail", [0, 1, 7, 100, 299, 300, 1000])
def test_tail_gives_the_last_lines_of_all_replicas(tmp_path: Path, tail: int) -> None:
    write_history(tmp_path / "api")
    assert texts(tmp_path / "api", tail=tail) == [str(number) for number in range(300)][300 - min(tail, 300) :]


def test_tail_finds_lines_longer_than_its_blocks(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "r.log")
    for number in range(9):
        writer.line(0, "o", str(number) + "x" * (MAX_LINE_BYTES - 1))
    assert [text[0] for text in texts(tmp_path, tail=4)] == ["5", "6", "7", "8"]


def test_since_excludes_earlier_lines(tmp_path: Path) -> None:
    write_history(tmp_path / "api")
    lines = list(read_logs(tmp_path / "api"))
    middle = lines[150].time
    expected = [line.text for line in lines if line.time >= middle]
    assert texts(tmp_path / "api", since=middle) == expected
    assert texts(tmp_path / "api", since=middle, tail=3) == expected[-3:]


def test_bytes_that_are_not_utf8_are_shown_replaced(tmp_path: Path, writer: LogWriter) -> None:
    writer.feed(0, "o", b"caf\xe9\n")
    assert texts(tmp_path / "api") == ["caf�"]


def drain(follower: LogFollower) -> list[str]:
    found: list[str] = []
    while lines := follower.poll():
        found += [line.text for line in lines]
    return found


def test_a_follower_starts_with_the_last_lines(tmp_path: Path) -> None:
    write_history(tmp_path / "api")
    follower = LogFollower(tmp_path / "api", tail=5)
    assert drain(follower) == ["295", "296", "297", "298", "299"]
    follower.close()
    assert drain(LogFollower(tmp_path / "api", tail=0)) == []


def test_a_follower_sees_each_line_once_across_rotations_and_new_replicas(tmp_path: Path) -> None:
    folder = tmp_path / "api"
    follower = LogFollower(folder)
    assert follower.poll() == []
    writer = LogWriter(folder / "r1.log", max_bytes=1000, backups=20)
    expected, found = [], []
    for number in range(300):
        writer.line(0, "o", str(number))
        expected.append(str(number))
        if number in (3, 4, 60, 61, 150):  # several rotations lie between two polls
            found += drain(follower)
            assert found == expected
    newcomer = LogWriter(folder / "r2.log")
    newcomer.line(0, "o", "new")
    assert drain(follower) == [*expected[len(found) :], "new"]
    follower.close()


def test_a_follower_misses_no_lines_during_rotation(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "r.log", max_bytes=20_000, backups=200)
    follower = LogFollower(tmp_path)
    assert follower.poll() == []
    thread = threading.Thread(
        target=lambda: [writer.line(0, "o", str(number)) for number in range(20_000)], daemon=True
    )
    thread.start()
    found: list[str] = []
    wait_until(lambda: found.extend(drain(follower)) or len(found) >= 20_000, 30)
    thread.join()
    assert found == [str(number) for number in range(20_000)]
    follower.close()


@pytest.mark.heavy
def test_a_reader_neither_misses_nor_repeats_lines_during_rotation(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "r.log", max_bytes=20_000, backups=500)
    thread = threading.Thread(
        target=lambda: [writer.line(0, "o", str(number)) for number in range(30_000)], daemon=True
    )
    thread.start()
    while thread.is_alive():
        found = texts(tmp_path)
        assert found == [str(number) for number in range(len(found))]
    thread.join()


def test_lines_are_in_order_though_files_are_rotated_twice_between_two_steps_of_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(tmp_path / "r.log", max_bytes=1, backups=10)  # a file for each line
    for number in range(3):
        writer.line(0, "o", str(number))
    stat = Path.stat

    def stat_and_rotate(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        monkeypatch.setattr(Path, "stat", stat)
        for number in (3, 4):
            writer.line(0, "o", str(number))
        return found

    monkeypatch.setattr(Path, "stat", stat_and_rotate)
    assert texts(tmp_path) == ["0", "1", "2", "3"]


def test_pruning_keeps_the_newest_past_replicas_and_all_present_ones(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "api"
    folder.mkdir(parents=True)
    (tmp_path / "logs" / "operator.log").write_text("not a replica's")
    for number in range(6):
        for name in (f"r{number}.log", f"r{number}.log.1"):
            (folder / name).write_bytes(b"x" * 100)
            os.utime(folder / name, (number, number))
    (folder / "r9.log").symlink_to("gone")  # as if somebody had deleted the file meanwhile
    prune(tmp_path / "logs", present={"r0"}, max_past=3, max_bytes=10_000)
    (folder / "r9.log").unlink()
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {"r0", "r3", "r4", "r5"}
    prune(tmp_path / "logs", present={"r0"}, max_past=3, max_bytes=450)
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {"r0", "r4", "r5"}
    assert (tmp_path / "logs" / "operator.log").exists()
