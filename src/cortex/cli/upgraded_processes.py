"""The version of cortex that a process of this machine runs, by its Python environment."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import cortex


def own_environments() -> set[Path]:
    """Return the folder of the environment that runs this command, as `environment_of` may name it."""
    return {Path(sys.executable).parent.parent, Path(sysconfig.get_path("purelib")).parents[2]}


def environment_of(pid: int) -> Path | None:
    """Return the environment whose cortex a process runs, None if it has ended. A project's is a layer on another."""
    import psutil  # noqa: PLC0415 - 20 ms, which most commands save

    from cortex.engine.environment import LAYER_FILE  # noqa: PLC0415 - as above

    try:
        prefix = Path(psutil.Process(pid).cmdline()[0]).parent.parent
    except (psutil.Error, IndexError):
        return None
    for layer in prefix.glob(f"lib/python*/site-packages/{LAYER_FILE}"):
        if found := re.search(r"addsitedir\('([^']+)'\)", layer.read_text()):
            return Path(found[1]).parents[2]
    return prefix


def runs_this_version(pid: int) -> bool:
    """Return whether a process was started with the cortex of this command, and not before it was installed there."""
    import psutil  # noqa: PLC0415 - as above

    try:
        started_at = psutil.Process(pid).create_time()
    except psutil.Error:
        return False
    return environment_of(pid) in own_environments() and started_at > Path(cortex.__file__).stat().st_ctime
