"""LitServe: one worker of one `LitAPI`. `WORKLOAD=noop PORT=8000 python server.py`.

LitServe accepts only JSON and forms, so it is left out of the upload of raw bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import litserve
import predictors
from fastapi import Response


class Noop(litserve.LitAPI):
    def setup(self, device: str) -> None: ...

    def predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        return predictors.noop(payload)


class Iris(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = predictors.Iris()

    def predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        return self.model.predict(payload)


class Download(litserve.LitAPI):
    def setup(self, device: str) -> None: ...

    def predict(self, payload: dict[str, Any]) -> bytes:
        return predictors.download(payload)

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/octet-stream")


class Stream(litserve.LitAPI):
    def setup(self, device: str) -> None: ...

    def predict(self, payload: dict[str, Any]) -> Iterator[str]:
        for chunk in predictors.stream(payload):
            yield chunk.decode()

    def encode_response(self, output: Iterator[str]) -> Iterator[str]:
        yield from output


APIS = {"noop": Noop, "iris": Iris, "download": Download, "stream": Stream}

if __name__ == "__main__":
    workload = os.environ["WORKLOAD"]
    server = litserve.LitServer(
        APIS[workload](stream=workload == "stream"),
        accelerator="cpu",
        workers_per_device=1,
        fast_queue=True,  # its own advice for high throughput
    )
    server.run(
        host="127.0.0.1",
        port=int(os.environ["PORT"]),
        num_api_servers=1,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )
