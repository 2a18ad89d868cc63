"""Classes that tests deploy as objects; the file travels whole."""

from __future__ import annotations

from typing import Any


class Times:
    def __init__(self, config: dict[str, Any]) -> None:
        self.factor = config["factor"]

    def handle_post(self, payload: Any) -> Any:
        return {"product": payload["number"] * self.factor}


class PythonPredictor:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def predict(self, payload: Any) -> Any:
        return f"got {payload}"
