from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import uvloop

from cortex.engine.installer import Installer, InstallerFailedError, uv_settings
from harness.wait import has_ended, wait_until

pytestmark = pytest.mark.processes


def run(tmp_path: Path, script: str, lines: list[str] | None = None) -> None:
    asyncio.run(started(tmp_path, script, lines if lines is not None else []))


async def started(tmp_path: Path, script: str, lines: list[str]) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as log:
        await Installer(tmp_path, dict(os.environ), log, log.fileno(), lines.append).run(["bash", "-c", script])


def test_output_is_forwarded_and_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    run(tmp_path, r"echo one; echo two >&2; printf '10%%\r100%%\n'; printf '\033[31mred\033[0m'", lines)
    assert lines == ["one", "two", "100%", "red"]
    assert (tmp_path / "log").read_text() == "one\ntwo\n100%\nred\n"


def test_one_installer_after_the_other_works_on_uvloop(tmp_path: Path) -> None:
    async def scenario() -> None:
        for _ in range(5):
            await started(tmp_path, "echo done", lines)

    lines: list[str] = []
    uvloop.run(scenario())
    assert lines == ["done"] * 5


def test_a_failure_carries_the_status_and_the_last_lines(tmp_path: Path) -> None:
    with pytest.raises(InstallerFailedError) as caught:
        run(tmp_path, "seq 100; exit 7")
    assert caught.value.status == 7
    assert caught.value.tail == tuple(str(number) for number in range(71, 101))


def test_credentials_in_urls_are_not_shown(tmp_path: Path) -> None:
    lines: list[str] = []
    run(tmp_path, "echo from https://user:secret@example.com/simple", lines)
    assert lines == ["from https://***@example.com/simple"]


def test_an_endless_line_is_read_in_pieces(tmp_path: Path) -> None:
    lines: list[str] = []
    run(tmp_path, "head -c 300000 /dev/zero | tr '\\0' x", lines)
    assert "".join(lines) == "x" * 300_000 and len(lines) > 1


def test_processes_left_by_an_installer_are_killed(tmp_path: Path) -> None:
    run(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: has_ended(pid))


def test_cancelling_kills_the_installer_and_its_children(tmp_path: Path) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(started(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid; wait", []))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: has_ended(pid))


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, {}),
        ({"PIP_INDEX_URL": "https://a"}, {"UV_DEFAULT_INDEX": "https://a"}),
        ({"PIP_INDEX_URL": "https://a", "UV_DEFAULT_INDEX": "https://b"}, {}),
        ({"PIP_INDEX_URL": "https://a", "UV_INDEX_URL": "https://b"}, {}),
        (
            {"PIP_EXTRA_INDEX_URL": "https://a https://b"},
            {"UV_INDEX": "https://a https://b", "UV_INDEX_STRATEGY": "unsafe-best-match"},
        ),
        ({"PIP_CERT": "/c.pem", "PIP_DEFAULT_TIMEOUT": "9"}, {"SSL_CERT_FILE": "/c.pem", "UV_HTTP_TIMEOUT": "9"}),
        ({"PIP_FIND_LINKS": "https://a /no/such/folder https://b"}, {"UV_FIND_LINKS": "https://a,https://b"}),
        ({"PIP_FIND_LINKS": "/no/such/folder"}, {}),
    ],
)
def test_settings_for_pip_are_translated_for_uv(environ: dict[str, str], settings: dict[str, str]) -> None:
    assert uv_settings(environ) == settings
