"""Listed objects, and the object names that no file can have.

Anyone may write any key into a bucket; one invalid key must not hide the others.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import NamedTuple

#: Limit of common file systems.
MAX_NAME_BYTES = 255
#: Deeper folders exceed the recursion limit of libraries that walk through them, such as Python's own.
MAX_DEPTH = 200
#: Control characters, which obstore rejects; undecodable bytes of local names, which JSON cannot represent; folders
#: named "", "." or "..".
_ODD = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|(?:^|/)\.{0,2}(?:/|\Z)")


class StoredObject(NamedTuple):
    """An object or a local file."""

    key: str  #: relative to the root of the bucket or file system, without a leading slash
    name: str  #: relative to the listed location; empty if it is the location itself
    size_bytes: int
    etag: str  #: without quotes; empty if the store has none
    modified_at: datetime
    flaw: str | None = None  #: why it cannot be downloaded

    @property
    def mark(self) -> str:
        """A value that changes with the content: the ETag, else the modification time."""
        return self.etag or self.modified_at.isoformat()


def flaw_of_name(name: str) -> str | None:
    """Return why no file can have this relative name, or None. The empty name is the listed location itself."""
    if not name:
        return None
    if _ODD.search(name):
        return "no file can have this name"
    if name.count("/") > MAX_DEPTH:
        return f"it is more than {MAX_DEPTH} folders deep"
    # A character has at most four bytes.
    if len(name) * 4 > MAX_NAME_BYTES and any(len(part.encode()) > MAX_NAME_BYTES for part in name.split("/")):
        return f"a part of its name is longer than {MAX_NAME_BYTES} bytes"
    return None


def printable(name: str) -> str:
    """Return a name on one line, shortened to 200 characters."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name[:200])
    return f"{shown}…" if len(name) > 200 else shown
