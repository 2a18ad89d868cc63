"""The end of a process in which `cortex.testing` has called an API."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.wait import PATIENCE_S

pytestmark = pytest.mark.processes

CONFIG = """
- name: streams
  kind: RealtimeAPI
  handler: {type: python, path: handler.py}
  networking: {timeout: 1s}
"""
HANDLER = """
import asyncio
from starlette.responses import StreamingResponse

class Handler:
    def __init__(self, config):
        pass

    async def handle_post(self, payload):
        return StreamingResponse(self.items(payload))

    async def items(self, does):
        yield "one"
        if does == "raise":
            raise ValueError("two")
        await asyncio.sleep(3600)
"""
CALLS = """
import contextlib, cortex.testing
with cortex.testing.load(".") as api:
    for does in ("raise", "raise", "never end"):
        with contextlib.suppress(cortex.testing.IncompleteResponseError, TimeoutError):
            api.post(does)
        print("called")
"""


def test_a_process_ends_although_streams_broke_off_or_never_end(tmp_path: Path) -> None:
    (tmp_path / "cortex.yaml").write_text(CONFIG)
    (tmp_path / "handler.py").write_text(HANDLER)
    called = [sys.executable, "-c", textwrap.dedent(CALLS)]
    done = subprocess.run(called, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "called\n" * 3
