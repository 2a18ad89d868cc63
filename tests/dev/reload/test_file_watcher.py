"""The watcher reports files whose content has changed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cortex.dev.reload.file_watcher import FileWatcher
from harness.wait import wait_until

pytestmark = pytest.mark.processes


def watcher(*paths: Path) -> FileWatcher:
    loop = asyncio.new_event_loop()
    made = FileWatcher(loop, lambda changed: None)
    made.watch(paths)
    loop.close()
    return made


def test_a_change_of_content_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    found = watcher(tmp_path / "a.py")
    assert found.poll() == set()
    (tmp_path / "a.py").write_text("2")
    assert found.poll() == {tmp_path / "a.py"}
    assert found.poll() == set()


def test_a_watcher_is_behind_until_a_change_is_polled(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    found = watcher(tmp_path / "a.py")
    assert not found.is_behind()
    (tmp_path / "a.py").write_text("2")
    assert found.is_behind()
    found.poll()
    assert not found.is_behind()


def test_a_file_that_changes_without_end_hides_no_other_change_and_delays_no_request(tmp_path: Path) -> None:
    handler, log = tmp_path / "a.py", tmp_path / "log.txt"
    handler.write_text("1")
    found = watcher(handler, log)
    stopped = threading.Event()

    def keep_writing() -> None:
        while not stopped.wait(0.005):
            log.write_text(str(time.monotonic_ns()))

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        wait_until(log.exists)
        handler.write_text("2")
        assert found.poll() == {handler, log}
        assert not found.is_behind()
    finally:
        stopped.set()
        writer.join()
    assert found.poll() <= {log}
    assert found.poll() == set()
    handler.write_text("3")
    assert found.is_behind()


def test_a_file_that_was_only_touched_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    found = watcher(tmp_path / "a.py")
    os.utime(tmp_path / "a.py", (1, 1))
    assert found.poll() == set()


def test_a_file_that_appears_is_removed_or_replaced_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    found = watcher(file)
    file.write_text("1")
    assert found.poll() == {file}
    (tmp_path / "b").write_text("2")
    (tmp_path / "b").replace(file)
    assert found.poll() == {file}
    file.unlink()
    assert found.poll() == {file}


def test_all_files_of_a_folder_are_watched(tmp_path: Path) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "1" / "weights").write_text("1")
    found = watcher(tmp_path / "model")
    (tmp_path / "model" / "1" / "weights").write_text("2")
    assert found.poll() == {tmp_path / "model" / "1" / "weights"}


def test_files_that_are_no_longer_watched_are_not_reported(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1")
    found = watcher(tmp_path / "a.py", tmp_path / "b.py")
    found.watch([tmp_path / "b.py"])
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("2")
    assert found.poll() == {tmp_path / "b.py"}


def test_files_to_which_this_process_prints_are_not_watched(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("out.txt", "err.txt", "a.py"):
        (tmp_path / "model" / name).write_text("1")
    code = """
import asyncio, pathlib, sys
from cortex.dev.reload.file_watcher import FileWatcher
folder = pathlib.Path(sys.argv[1])
watcher = FileWatcher(asyncio.new_event_loop(), print)
watcher.watch([folder, *folder.iterdir()])
print("2", flush=True)
print("2", flush=True, file=sys.stderr)
(folder / "a.py").write_text("2")
assert watcher.poll() == {folder / "a.py"}
"""
    with (tmp_path / "model" / "out.txt").open("a") as output, (tmp_path / "model" / "err.txt").open("a") as errors:
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "model")], stdout=output, stderr=errors, check=False
        )
    assert done.returncode == 0, (tmp_path / "model" / "err.txt").read_text()
