"""Tells whether a node is the machine that this process runs on, so that its replicas' unix sockets lead to them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cortex.cluster.node_start import IDENTITY_FILE
from cortex.home import Home
from cortex.identity import Identity


def is_here(told: Mapping[str, Any]) -> bool:
    """Tell whether the agent that said all this of itself can be reached by paths.

    Then its address is one of ours, its kernel was booted when ours was, and we may read what it wrote about itself in
    its home. Of containers that share a network or a folder, or of another user's processes, not all of it is true.
    """
    try:
        boot_id = Identity.from_json(json.loads(told["identity"])).boot_id
        if not boot_id or boot_id != Identity.of(os.getpid()).boot_id or not _is_own_address(str(told["host"])):
            return False
        written = json.loads((Home(Path(told["home"])).run_dir / IDENTITY_FILE).read_text())
        return bool(written["identity"] == told["identity"])
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _is_own_address(host: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            return False
    return True
