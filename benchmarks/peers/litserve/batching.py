"""LitServe: one worker, with dynamic batching or without. `WORKLOAD=light BATCHED=1 PORT=8000 python batching.py`."""

from __future__ import annotations

import os
from typing import Any

import litserve
from mlp_model import WIDTHS, Mlp

WIDTH = WIDTHS[os.environ["WORKLOAD"]]
MAX_BATCH_SIZE, BATCH_TIMEOUT_S = 64, 0.002


class One(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = Mlp(WIDTH)

    def predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        return self.model.predict_one(payload)


class Many(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = Mlp(WIDTH)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.model.predict(payloads)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output


if __name__ == "__main__":
    batched = Many(max_batch_size=MAX_BATCH_SIZE, batch_timeout=BATCH_TIMEOUT_S)
    api = batched if os.environ["BATCHED"] == "1" else One()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(os.environ["PORT"]),
        num_api_servers=1,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )
