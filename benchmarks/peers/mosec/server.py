"""Mosec: one worker process of the class that the workload needs. `WORKLOAD=noop python server.py --port 8000`."""

from __future__ import annotations

import os
from typing import Any

import predictors
from mosec import Server, SSEWorker, Worker


class Noop(Worker):
    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        return predictors.noop(data)


class Iris(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.model = predictors.Iris()

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        return self.model.predict(data)


class Upload(Worker):
    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> dict[str, Any]:
        return predictors.upload(data)


class Download(Worker):
    resp_mime_type = "application/octet-stream"

    def forward(self, data: dict[str, Any]) -> bytes:
        return predictors.download(data)

    def serialize(self, data: bytes) -> bytes:
        return data


class Stream(SSEWorker):
    def forward(self, data: dict[str, Any]) -> str:
        for chunk in predictors.stream(data):
            self.send_stream_event(chunk.decode())
        return ""


WORKERS = {"noop": Noop, "iris": Iris, "upload": Upload, "download": Download, "stream": Stream}

if __name__ == "__main__":
    server = Server()
    server.append_worker(WORKERS[os.environ["WORKLOAD"]], num=1, route="/predict")
    server.run()
