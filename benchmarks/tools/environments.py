"""Virtual environments of the peers, built from `requirements.txt` and rebuilt when that file changes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.tools.paths import PEERS, VENVS

#: Variables of peers that are Ray's: with tokens it would leave one in the user's home, which every later Ray asks for.
OF_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment, which must have been prepared."""
    return VENVS / peer / "bin" / "python"


def prepare(peer: str) -> Path:
    """Build a peer's environment with pip, unless it exists; `PIP_*` settings apply."""
    requirements = PEERS / peer / "requirements.txt"
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    folder = VENVS / peer
    stamp = folder / "requirements.sha256"
    if stamp.is_file() and stamp.read_text() == digest:
        return python_of(peer)
    print(f"making the environment of {peer} …", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    install = [str(python_of(peer)), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]
    subprocess.run(install, check=True)
    stamp.write_text(digest)
    return python_of(peer)
