"""BentoML: one service, with batching or without. `WORKLOAD=light BATCHED=1 bentoml serve batching:Service`."""

from __future__ import annotations

import os
from typing import Any

import bentoml
from mlp_model import WIDTHS, Mlp

BATCHED = os.environ["BATCHED"] == "1"
WIDTH = WIDTHS[os.environ["WORKLOAD"]]


if BATCHED:

    @bentoml.service(workers=1, traffic={"timeout": 30}, logging={"access": {"enabled": False}})
    class Service:
        def __init__(self) -> None:
            self.model = Mlp(WIDTH)

        @bentoml.api(batchable=True, max_batch_size=64, max_latency_ms=1000)
        def predict(self, payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return self.model.predict(payloads)

else:

    @bentoml.service(workers=1, traffic={"timeout": 30}, logging={"access": {"enabled": False}})
    class Service:  # type: ignore[no-redef]
        def __init__(self) -> None:
            self.model = Mlp(WIDTH)

        @bentoml.api
        def predict(self, payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return self.model.predict(payloads)
