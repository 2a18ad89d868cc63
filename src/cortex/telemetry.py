"""Structured logs: one line per event, with a constant message and fields. Standard library only."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

_MAX_BYTES = 10 * 1024 * 1024
_BACKUPS = 3
_LINE = re.compile(r"(\S+Z) (info|warning|error|critical) (.*)")
_FIELD = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^ "=]+)')
_FIELDS = re.compile(rf"(?:{_FIELD.pattern})*$")


class Logger:
    """Logs events with fields: `logger.info("replica started", api="iris", replica="iris-1")`.

    info: a state changed. warning: a problem was handled. error: someone must act.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, message: str, **fields: object) -> None:
        """Log a change of state."""
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Log a problem that was handled."""
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, exc_info: BaseException | None = None, **fields: object) -> None:
        """Log a problem that requires action, with the traceback of `exc_info`."""
        self._log(logging.ERROR, message, fields, exc_info)

    def _log(
        self, level: int, message: str, fields: Mapping[str, object], exc_info: BaseException | None = None
    ) -> None:
        self._logger.log(level, message, extra={"fields": fields}, exc_info=exc_info)


class LogFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z info replica started api=iris`; values with blanks or quotes are JSON strings."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the event as one line; a traceback becomes a field."""
        moment = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            fields["traceback"] = self.formatException(record.exc_info)
        parts = [f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z", record.levelname.lower()]
        parts.append(record.getMessage().replace("\n", "\\n"))
        parts += [f"{key}={_value(value)}" for key, value in fields.items()]
        return " ".join(parts)


def parse(line: str) -> dict[str, str]:
    """Return time, level, message and fields of a line that `LogFormatter` wrote; of any other, only the message."""
    parts = _LINE.fullmatch(line)
    if parts is None:
        return {"message": line}
    message, fields = parts[3], _FIELDS.search(parts[3])
    found = {"time": parts[1], "level": parts[2], "message": message}
    if fields and fields[0]:
        found["message"] = message[: fields.start()]
        for name, value in _FIELD.findall(fields[0]):
            found.setdefault(name, json.loads(value) if value.startswith('"') else value)
    return found


def configure(path: Path | None) -> None:
    """Write all logs to a rotated file, or to standard error if `path` is None."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=_BACKUPS, delay=True)
    handler.setFormatter(LogFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)


def _value(value: object) -> str:
    text = str(value)
    if text and all(character.isprintable() and character not in ' "=' for character in text):
        return text
    return json.dumps(text, ensure_ascii=False)
