"""What a listing of storage consists of, and which names no file can have; knows no store.

Names come from outside: anybody may write any key into a bucket, and one odd key must not hide the others.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import NamedTuple

#: Longer names are refused by every file system in use.
MAX_NAME_BYTES = 255
#: Deeper ones are too much for what walks through folders by recursion, such as Python's own library.
MAX_DEPTH = 200
#: Control characters, which the library refuses to ask for; bytes of a local name that are no UTF-8, which can't be
#: written as JSON; folders named "", "." or "..".
_ODD = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|(?:^|/)\.{0,2}(?:/|\Z)")


class StoredObject(NamedTuple):
    """One object, or one local file."""

    key: str  #: from the root of the bucket, or of the file system; without a leading slash
    name: str  #: from the location that was listed; empty if it is this object
    size_bytes: int
    etag: str  #: without quotes; empty where a store has none
    modified_at: datetime
    flaw: str | None = None  #: why it can't be downloaded

    @property
    def mark(self) -> str:
        """Return what differs once the content does; the time counts only where there is nothing better."""
        return self.etag or self.modified_at.isoformat()


def flaw_of_name(name: str) -> str | None:
    """Tell why no file can have this relative name; None if one can. The empty name is the listed location itself."""
    if not name:
        return None
    if _ODD.search(name):
        return "no file can have this name"
    if name.count("/") > MAX_DEPTH:
        return f"it is more than {MAX_DEPTH} folders deep"
    # The longest characters take four bytes.
    if len(name) * 4 > MAX_NAME_BYTES and any(len(part.encode()) > MAX_NAME_BYTES for part in name.split("/")):
        return f"a part of its name is longer than {MAX_NAME_BYTES} bytes"
    return None


def printable(name: str) -> str:
    """Return a name as it can be shown on one line, at most 200 characters of it."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name[:200])
    return f"{shown}…" if len(name) > 200 else shown
