"""One installation per test process, because each start takes seconds of CPU: modules use it in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.installations.installation import Installation, installation


@pytest.fixture(scope="session")
def shared_installation() -> Iterator[Installation]:
    """A running operator and gateway, with the APIs of one module at a time."""
    with installation(variables={"CORTEX_PASSWORD": "of the operator"}) as made:
        yield made


@pytest.fixture(scope="module")
def cortex(shared_installation: Installation) -> Iterator[Installation]:
    """A running operator and gateway without APIs. Their log files may have lines of earlier modules."""
    yield shared_installation
    shared_installation.clear()
