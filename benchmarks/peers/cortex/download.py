from typing import Any

from predictors import download


class Handler:
    def handle_post(self, payload: dict[str, Any]) -> bytes:
        return download(payload)
