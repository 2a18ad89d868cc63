"""Ray Serve: one replica of one deployment on a Ray of its own. `WORKLOAD=noop PORT=8000 python server.py`."""

from __future__ import annotations

import os
import signal
import sys

import predictors
import ray
from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse


class Noop:
    async def __call__(self, request: Request) -> Response:
        return JSONResponse(predictors.noop(await request.json()))


class Iris:
    def __init__(self) -> None:
        self.model = predictors.Iris()

    async def __call__(self, request: Request) -> Response:
        return JSONResponse(self.model.predict(await request.json()))


class Upload:
    async def __call__(self, request: Request) -> Response:
        return JSONResponse(predictors.upload(await request.body()))


class Download:
    async def __call__(self, request: Request) -> Response:
        return Response(predictors.download(await request.json()), media_type="application/octet-stream")


class Stream:
    async def __call__(self, request: Request) -> Response:
        return StreamingResponse(predictors.stream(await request.json()), media_type="application/octet-stream")


CLASSES = {"noop": Noop, "iris": Iris, "upload": Upload, "download": Download, "stream": Stream}


def main() -> None:
    ray.init(
        address="local",  # never attach to a cluster that happens to run here
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200_000_000,
        _temp_dir=os.environ["RAY_TMPDIR"],
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PORT"])})
    deployment = serve.deployment(CLASSES[os.environ["WORKLOAD"]], name="predict")
    app = deployment.options(num_replicas=1, max_ongoing_requests=100, ray_actor_options={"num_cpus": 1}).bind()
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    serve.run(app, name="bench", route_prefix="/predict", logging_config=quiet)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
