"""Joins what user code prints to the request that it is printed for: the streams of a worker mark their lines.

A line of a request begins with MARK, the request's id and END, which the supervisor takes off. MARK can't be guessed:
callers whose input user code prints can't have a line pass for one of another request. Standard library only.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import sys
import threading
from contextvars import ContextVar

#: The id of the request that the current call is for; empty outside of calls. Calls set it and nobody resets it: only
#: calls run in those contexts.
REQUEST: ContextVar[bytes] = ContextVar("cortex_request", default=b"")
#: Around the id, at the start of a line. Each supervisor has its own; its workers know it because they are forked.
MARK, END = f"\x1e{secrets.token_hex(8)}:", "\x1f"

#: What an id may be; others are not written.
ID = "[!-~]{1,64}"
_ID = re.compile(ID.encode())
#: So many cut lines are remembered.
_MAX_CUT = 1000


class RequestStream(io.TextIOWrapper):
    """Standard output or error of a worker. Threads and tasks may print at once: each line is of one request."""

    _owner = b""  #: whose line it is that is not complete
    _is_open = False  #: a line is not complete

    def __init__(self, stream: io.TextIOWrapper) -> None:
        encoding, errors = stream.encoding, stream.errors
        super().__init__(stream.detach(), encoding, errors, newline="\n", line_buffering=True)
        self._cut: set[bytes] = set()  #: requests whose incomplete line was ended for another's
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def write(self, text: str) -> int:
        """Write, and say of each line whose it is."""
        owner = REQUEST.get()
        if owner and not _ID.fullmatch(owner):
            owner = b""
        if not owner and not self._owner and not self._cut:
            self._is_open = not text.endswith("\n") if text else self._is_open
            return super().write(text)
        if type(text) is not str or not text:
            return super().write(text)
        with self._lock:
            super().write(self._marked(owner, text))
        return len(text)

    def _marked(self, owner: bytes, text: str) -> str:
        before = ""
        if self._is_open and self._owner != owner:
            before = "\n"
            self._cut.add(self._owner)
            self._is_open = False
        if not self._is_open and owner in self._cut:
            self._cut.discard(owner)
            text = text.removeprefix("\n")  # its line was ended already
        if len(self._cut) > _MAX_CUT:
            self._cut.clear()
        if not text:
            return before
        mark = f"{MARK}{owner.decode('latin-1')}{END}" if owner else ""
        is_complete = text.endswith("\n")
        lines = (text[:-1] if is_complete else text).replace("\n", f"\n{mark}")
        marked = f"{before}{'' if self._is_open else mark}{lines}{chr(10) if is_complete else ''}"
        self._is_open, self._owner = not is_complete, b"" if is_complete else owner
        return marked

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may print while its thread does


def mark_streams() -> None:
    """Have standard output and error of this process say whose their lines are."""
    for name in ("stdout", "stderr"):
        inherited = getattr(sys, name)
        # Made anew, as the inherited one knows whether its descriptor can seek from when that was another file.
        fresh = open(inherited.fileno(), "w", encoding=inherited.encoding, errors=inherited.errors, closefd=False)  # noqa: PTH123, SIM115
        stream = RequestStream(fresh)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
