from typing import Any

from predictors import noop


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def handle_post(self, payload: dict[str, Any]) -> dict[str, Any]:
        return noop(payload)
