from collections.abc import Iterator
from typing import Any

from predictors import stream


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def handle_post(self, payload: dict[str, Any]) -> Iterator[bytes]:
        return stream(payload)
