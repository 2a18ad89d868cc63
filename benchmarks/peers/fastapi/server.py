"""FastAPI: the model is loaded in the lifespan; routes are `async def`, as in its documentation."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import predictors
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

models: dict[str, predictors.Iris] = {}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    if os.environ["WORKLOAD"] == "iris":
        models["iris"] = predictors.Iris()
    yield
    models.clear()


app = FastAPI(lifespan=lifespan)


@app.post("/noop")
async def noop(payload: dict[str, Any]) -> dict[str, Any]:
    return predictors.noop(payload)


@app.post("/iris")
async def iris(payload: dict[str, Any]) -> dict[str, Any]:
    return models["iris"].predict(payload)


@app.post("/upload")
async def upload(request: Request) -> dict[str, Any]:
    return predictors.upload(await request.body())


@app.post("/download")
async def download(payload: dict[str, Any]) -> Response:
    return Response(predictors.download(payload), media_type="application/octet-stream")


@app.post("/stream")
async def stream(payload: dict[str, Any]) -> StreamingResponse:
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in predictors.stream(payload):
            yield chunk

    return StreamingResponse(chunks(), media_type="application/octet-stream")


@app.post("/mixed")
async def mixed(request: Request) -> Response:
    """JSON in, JSON out; bytes in, their length; `{"x": "download"}`: 1 MB."""
    body = await request.body()
    if request.headers["content-type"] != "application/json":
        return Response(b'{"length":%d}' % len(body), media_type="application/json")
    if body == b'{"x": "download"}':
        return Response(predictors.MEGABYTE, media_type="application/octet-stream")
    return Response(b'{"y":1}', media_type="application/json")
