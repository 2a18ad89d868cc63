from typing import Any

from mlp_model import Mlp


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        self.model = Mlp(config["width"])

    def handle_post(self, payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.model.predict(payload)
