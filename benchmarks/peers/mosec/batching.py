"""Mosec: one worker process, with batching or without. `WORKLOAD=light BATCHED=1 python batching.py --port 8000`."""

from __future__ import annotations

import os
from typing import Any

from mlp_model import WIDTHS, Mlp
from mosec import Server, Worker

WIDTH = WIDTHS[os.environ["WORKLOAD"]]
#: Its batches close at once when they are full; else the wait is a trade of latency for size.
MAX_BATCH_SIZE, MAX_WAIT_MS = 64, 2


class One(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.model = Mlp(WIDTH)

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        return self.model.predict_one(data)


class Many(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.model = Mlp(WIDTH)

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.model.predict(data)


if __name__ == "__main__":
    server = Server()
    if os.environ["BATCHED"] == "1":
        server.append_worker(Many, num=1, max_batch_size=MAX_BATCH_SIZE, max_wait_time=MAX_WAIT_MS, route="/predict")
    else:
        server.append_worker(One, num=1, route="/predict")
    server.run()
