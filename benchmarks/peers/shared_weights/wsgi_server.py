"""A WSGI application that loads the model when it is imported. `LIBRARY=numpy gunicorn --preload wsgi_server:app`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import weights

predict = weights.load(os.environ["LIBRARY"], Path(os.environ["MODELS"]))


def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    size = int(environ.get("CONTENT_LENGTH") or 0)
    body = json.dumps(predict(json.loads(environ["wsgi.input"].read(size))["i"])).encode()
    start_response("200 OK", [("content-type", "application/json"), ("content-length", str(len(body)))])
    return [body]
