"""One installation per test module: starting one is cheap, but not free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.installations.installation import Installation, installation


@pytest.fixture(scope="module")
def cortex() -> Iterator[Installation]:
    """A running operator and gateway."""
    with installation() as made:
        yield made
