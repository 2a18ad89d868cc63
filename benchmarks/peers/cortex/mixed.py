from typing import Any

from predictors import MEGABYTE


class Handler:
    """JSON in, JSON out; bytes in, their length; `{"x": "download"}`: 1 MB."""

    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def handle_post(self, payload: Any) -> dict[str, Any] | bytes:
        if isinstance(payload, bytes):
            return {"length": len(payload)}
        if payload["x"] == "download":
            return MEGABYTE
        return {"y": payload["x"]}
