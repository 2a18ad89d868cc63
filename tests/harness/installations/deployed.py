"""Classes that tests deploy as objects; the whole file is uploaded."""

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


class TimesAll:
    def __init__(self, config: dict[str, Any]) -> None:
        self.factor = config["factor"]

    def handle_batch(self, payload: list[int]) -> list[int]:
        return [number * self.factor for number in payload]


class BatchPredictor:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def predict(self, payload: list[int]) -> list[int]:
        return [number * 3 for number in payload]


class Once:
    def __call__(self, config: dict[str, Any]) -> None:
        print("called with", config)
