"""Values shortened to one line of a log: whoever asks for it must not be able to fill the log, or the memory."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

#: Of each list and dict, on each level.
MAX_ITEMS = 10
MAX_CHARACTERS = 500


class _Shortened(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = MAX_ITEMS
        self.maxstring = self.maxother = self.maxlong = MAX_CHARACTERS

    def repr_bytes(self, value: bytes, level: int) -> str:
        # Else all of it is made text first, which takes four times as much memory as the body of a request.
        return _cut(repr(value[:MAX_CHARACTERS]), len(value) > MAX_CHARACTERS)

    repr_bytearray = repr_bytes


_SHORT = _Shortened()


def shortened(value: Any) -> str:
    """Return a value in short. Never raises."""
    try:
        text = _SHORT.repr(value).replace("\n", "\\n")
    except BaseException as error:  # the value may be the user's, and say sys.exit()
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return _cut(text, False)


def _cut(text: str, is_longer: bool) -> str:
    return f"{text[: MAX_CHARACTERS - 1]}…" if is_longer or len(text) > MAX_CHARACTERS else text
