from typing import Any

from predictors import noop


class Handler:
    def handle_post(self, payload: dict[str, Any]) -> dict[str, Any]:
        return noop(payload)
