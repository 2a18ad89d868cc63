from typing import Any

from mlp_model import Mlp


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        self.model = Mlp(config["width"])

    def handle_post(self, payload: dict[str, Any]) -> dict[str, Any]:
        return self.model.predict_one(payload)
