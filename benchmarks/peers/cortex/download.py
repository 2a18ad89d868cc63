from typing import Any

from predictors import download


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def handle_post(self, payload: dict[str, Any]) -> bytes:
        return download(payload)
