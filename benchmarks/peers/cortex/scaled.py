"""API whose calls wait for a random time, so that replicas behave as if on separate machines."""

from __future__ import annotations

import math
import random
import time
from typing import Any

MEAN_S = 0.1
CV = 0.5
_SIGMA = math.sqrt(math.log(1 + CV**2))


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        self._chance = random.Random()
        time.sleep(config.get("load_s", 0.0))

    def handle_post(self, payload: dict[str, Any]) -> dict[str, Any]:
        time.sleep(MEAN_S * math.exp(_SIGMA * self._chance.gauss(0, 1) - _SIGMA**2 / 2))
        return {"y": payload["x"]}
