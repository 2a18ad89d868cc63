"""A restarted operator stands by, even without network."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from cortex.home import Home
from cortex.installation import Installation
from harness.ports import free_port
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

#: A link-local address without a zone is unreachable, like every address without network.
NOWHERE = "[fe80::1]:6379"


def alive(process: subprocess.Popen[str], port: int) -> dict[str, Any] | None:
    assert process.poll() is None, process.communicate()[0]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=PATIENCE_S) as answer:
            told: dict[str, Any] = json.load(answer)
            return told
    except urllib.error.URLError:
        return None


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install cortex-serving[ray]")
def test_an_operator_that_lost_leadership_and_network_stands_by(home: Home) -> None:
    database = f"postgresql://cortex:secret@127.0.0.1:{free_port()}/none"
    Installation(engine="ray", ray_address=NOWHERE, database=database).write(home)
    port = free_port()
    ports = ["--operator-port", str(port), "--gateway-port", str(free_port())]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cortex.operator.main", *ports],
        env={**os.environ, "CORTEX_HOME": str(home.path), "CORTEX_BEGUN_ANEW": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        told = wait_until(lambda: alive(process, port), message="the operator answers")
        assert told == {"ok": True, "leads": False, "leader": None}
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    assert Installation.read(home).operator_port == port, "settings are saved although it never led"
