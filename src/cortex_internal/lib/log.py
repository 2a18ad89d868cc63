"""The logger that user code imports: one line per record on standard output, which becomes the replica's log.

It does not import cortex, so that user code also runs without it.
"""

from __future__ import annotations

import logging
import os
import sys

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _LineFormatter(logging.Formatter):
    """`LEVEL message key=value …`, on one line; a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - named by the standard library
        message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        extras = (f"{key}={value!r}" for key, value in vars(record).items() if key not in _STANDARD_FIELDS)
        return " ".join((record.levelname, message, *extras))


class _StandardOutput(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current `sys.stdout`, so that redirecting it works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stdout


def _make_logger() -> logging.Logger:
    made = logging.getLogger("cortex")
    if not any(isinstance(handler, _StandardOutput) for handler in made.handlers):
        handler = _StandardOutput()
        handler.setFormatter(_LineFormatter())
        made.addHandler(handler)
    made.propagate = False  # otherwise the root logger's handlers repeat each line
    level = os.environ.get("CORTEX_LOG_LEVEL", "info").upper()
    made.setLevel(level if level in logging.getLevelNamesMapping() else logging.INFO)
    return made


logger = _make_logger()
