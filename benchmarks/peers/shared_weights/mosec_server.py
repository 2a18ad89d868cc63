"""Mosec with several workers. `LIBRARY=numpy MODELS=folder WORKERS=4 python mosec_server.py --port 8000`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import weights
from mosec import Server, Worker


class Model(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.predict = weights.load(os.environ["LIBRARY"], Path(os.environ["MODELS"]))

    def forward(self, data: dict[str, Any]) -> int:
        return self.predict(data["i"])


if __name__ == "__main__":
    server = Server()
    server.append_worker(Model, num=int(os.environ["WORKERS"]), route="/predict")
    server.run()
