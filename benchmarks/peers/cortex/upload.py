from typing import Any

from predictors import upload


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def handle_post(self, payload: bytes) -> dict[str, Any]:
        return upload(payload)
