"""One installation per test module, because each start takes time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.installations.installation import Installation, installation


@pytest.fixture(scope="module")
def cortex() -> Iterator[Installation]:
    """A running operator and gateway."""
    with installation() as made:
        yield made
