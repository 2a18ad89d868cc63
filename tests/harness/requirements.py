"""Programs and rights that some tests require."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def require_programs(title: str, *programs: str) -> None:
    """Skip the test if a program is not installed; fail if CI is set."""
    if not all(map(shutil.which, programs)):
        skip(f"{title} is not installed: sudo sh scripts/test-services long")


def skip(reason: str) -> NoReturn:
    """Skip the test; fail if CI is set, where everything is installed."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
