from __future__ import annotations

import pytest

from cortex.home import Home
from harness.installations.deploy_desk import Desk


@pytest.fixture
def desk(home: Home) -> Desk:
    return Desk(home)
