"""Installers as child processes: logs and forwards their output, ends their whole process group.

Also translates a machine's settings for pip into those of uv.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_TAIL_LINES = 30
_MAX_LINE_BYTES = 64 * 1024
_LOG_MAX_BYTES = 10 * 1024 * 1024
#: Time to wait for output after an installer has ended: a process that it left running may keep the pipe open.
_OUTPUT_GRACE_S = 1.0

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: pip's variable → uv's with the same meaning; the first of uv's is set, unless one of them is set already.
_SAME_MEANING = {
    "PIP_INDEX_URL": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "PIP_EXTRA_INDEX_URL": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "PIP_NO_INDEX": ("UV_NO_INDEX",),
    "PIP_TRUSTED_HOST": ("UV_INSECURE_HOST",),
    "PIP_CERT": ("SSL_CERT_FILE",),
    "PIP_DEFAULT_TIMEOUT": ("UV_HTTP_TIMEOUT",),
}


class InstallerFailedError(Exception):
    """An installer ended with an error; `tail` holds its last lines."""

    def __init__(self, status: int, tail: Sequence[str]) -> None:
        super().__init__(f"ended with exit code {status}")
        self.status, self.tail = status, tuple(tail)


@dataclass(frozen=True)
class Installer:
    """Runs the installers of one environment.

    The children inherit `lock`: if this process dies, an orphan keeps the lock until it has ended.
    """

    folder: Path
    environ: Mapping[str, str]
    log: BinaryIO
    lock: int
    on_line: Callable[[str], None]

    async def run(self, command: Sequence[str]) -> None:
        """Run a command to its end. Cancellation kills its process group. Raises: InstallerFailedError, OSError."""
        # Not a pipe of asyncio: waiting for the process would also wait for the end of its output, which a child that
        # it left running may never close.
        output, child_end = os.pipe()
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *command,
                cwd=self.folder,
                env=dict(self.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=child_end,
                stderr=child_end,
                start_new_session=True,
                pass_fds=(self.lock,),
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # It may already run and have started others, which only its process group reaches.
            with contextlib.suppress(OSError):
                await _kill_all(await starting)
            os.close(output)
            raise
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(child_end)
        # The transport closes the pipe, uvloop's a moment later: closing it here too could close a reused descriptor.
        await self._wait(process, os.fdopen(output, "rb", buffering=0))

    async def _wait(self, process: asyncio.subprocess.Process, pipe: BinaryIO) -> None:
        stream = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), pipe
        )
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        reading = asyncio.create_task(self._read(stream, tail))
        try:
            await process.wait()
            await asyncio.wait([reading], timeout=_OUTPUT_GRACE_S)
        finally:
            if process.returncode is None or not reading.done():
                await _kill_all(process)
            reading.cancel()
            await asyncio.gather(reading, process.wait(), return_exceptions=True)
            transport.close()
        if process.returncode:
            raise InstallerFailedError(process.returncode, tail)

    async def _read(self, stream: asyncio.StreamReader, tail: deque[str]) -> None:
        while raw := await _line(stream):
            # Progress bars rewrite their line; keep the last version.
            text = _ANSI.sub("", raw.decode(errors="replace")).rstrip().rpartition("\r")[2]
            line = _CREDENTIALS.sub("***@", text)
            tail.append(line)
            if self.log.tell() < _LOG_MAX_BYTES:
                with contextlib.suppress(OSError):
                    self.log.write(line.encode(errors="replace") + b"\n")
            self.on_line(line)


async def _kill_all(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, or a part of one that is too long."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


def uv_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of uv that correspond to the machine's settings for pip, which uv does not read.

    Settings of uv that are present take precedence.
    """
    settings = {}
    for pip, (target, *others) in _SAME_MEANING.items():
        value = environ.get(pip)
        if value and not any(name in environ for name in (target, *others)):
            settings[target] = value
    if "UV_INDEX" in settings and "UV_INDEX_STRATEGY" not in environ:
        # As pip: the best version of all indexes, not the first index that has the package.
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    links = [link for link in environ.get("PIP_FIND_LINKS", "").split() if "://" in link or Path(link).is_dir()]
    if links and "UV_FIND_LINKS" not in environ:
        settings["UV_FIND_LINKS"] = ",".join(links)
    return settings
