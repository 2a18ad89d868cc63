from typing import Any

from predictors import Iris


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        self.model = Iris()

    def handle_post(self, payload: dict[str, Any]) -> dict[str, Any]:
        return self.model.predict(payload)
