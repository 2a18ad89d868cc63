"""Log of a worker process: lines that user code prints carry the id of the request they were printed for.

Standard output and error of a worker prefix each line of a request with MARK, the request id and END, which the
supervisor removes. MARK cannot be guessed, so a caller whose input is printed cannot forge a line of another request.
Standard library only.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
from contextvars import ContextVar

#: The id of the request of the current call; empty outside of calls. Calls set it and never reset it, because only
#: calls run in those contexts.
REQUEST: ContextVar[bytes] = ContextVar("cortex_request", default=b"")
#: Delimiters of the id at the start of a line. Random per supervisor; its workers inherit them by being forked.
MARK, END = f"\x1e{os.urandom(8).hex()}:", "\x1f"

#: Pattern of a request id, which `:` and a trace id may follow; other ids are not written.
ID = "[!-~]{1,64}(?::[0-9a-f]{32})?"
_ID = re.compile(ID.encode())
#: https://www.w3.org/TR/trace-context/: version, trace id, parent id, flags. Later versions may append fields.
_TRACEPARENT = re.compile(
    rb"(?:00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    rb"|(?!00|ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?)"
)
_TRACEPARENT_BYTES = 55
#: Requests with an interrupted line that are tracked.
_MAX_CUT = 1000


class MarkedStream(io.TextIOWrapper):
    """Standard output or error of a worker. Threads and tasks may print concurrently; each line is of one request."""

    _owner = b""  #: request id of the incomplete line
    _is_open = False  #: the last line is incomplete

    def __init__(self, stream: io.TextIOWrapper) -> None:
        encoding, errors = stream.encoding, stream.errors
        super().__init__(stream.detach(), encoding, errors, newline="\n", line_buffering=True)
        self._cut: set[bytes] = set()  #: requests whose incomplete line was ended for a line of another
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def write(self, text: str) -> int:
        """Write text and prefix each of its lines with the id of the current request."""
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
            text = text.removeprefix("\n")  # the line was ended already
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
        self._lock = threading.RLock()  # a signal handler may print while its thread prints


def log_id(request_id: bytes, traceparent: bytes) -> bytes:
    """Return the value of `REQUEST` for a request: its id, and its trace id if the header `traceparent` is valid."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return b"%b:%b" % (request_id, found[1] or found[2]) if found and request_id else request_id


def valid_traceparent(value: str) -> str:
    """Return a header `traceparent` if it is valid and of the usual length; otherwise an empty string."""
    is_usual = len(value) == _TRACEPARENT_BYTES and value.isascii()
    return value if is_usual and _TRACEPARENT.fullmatch(value.encode()) else ""


#: Standard error of a worker, and a duplicate of its descriptor that user code does not know.
_worker_log: tuple[MarkedStream, MarkedStream] | None = None


def write_log(text: str) -> None:
    """Write to the replica's log, also if user code has replaced or closed standard error. Never raises."""
    with contextlib.suppress(Exception):
        if _worker_log is None:  # this is no worker
            sys.stderr.write(text)
            return
        stream, duplicate = _worker_log
        (stream if _is_intact(stream, duplicate) else duplicate).write(text)


def _is_intact(stream: MarkedStream, duplicate: MarkedStream) -> bool:
    try:
        return os.path.sameopenfile(stream.fileno(), duplicate.fileno())
    except (OSError, ValueError):  # the descriptor or the stream is closed
        return False


def follow_stderr() -> None:
    """Write to what is standard error of this process now; call it after the descriptor was replaced."""
    if _worker_log is not None:
        os.dup2(2, _worker_log[1].fileno(), inheritable=False)


def mark_streams() -> None:
    """Replace standard output and error of this process by streams that prefix lines with request ids."""
    global _worker_log
    for name in ("stdout", "stderr"):
        inherited = getattr(sys, name)
        # A new object: the inherited one has cached whether its descriptor is seekable, which was another file then.
        fresh = open(inherited.fileno(), "w", encoding=inherited.encoding, errors=inherited.errors, closefd=False)  # noqa: PTH123, SIM115
        stream = MarkedStream(fresh)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    duplicate = open(os.dup(2), "w", encoding=stream.encoding, errors=stream.errors)  # noqa: PTH123, SIM115
    _worker_log = stream, MarkedStream(duplicate)
