from typing import Any

from predictors import upload


class Handler:
    def handle_post(self, payload: bytes) -> dict[str, Any]:
        return upload(payload)
