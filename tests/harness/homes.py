"""Homes of tests whose paths are short enough for unix sockets."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cortex.home import Home


@contextlib.contextmanager
def temporary_home(prefix: str = "cortex-") -> Iterator[Home]:
    """Create a home; remove it afterwards with its metrics, which may be outside of it."""
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        home = Home(Path(folder))
        home.create()
        try:
            yield home
        finally:
            shutil.rmtree(home.metrics_dir, ignore_errors=True)
