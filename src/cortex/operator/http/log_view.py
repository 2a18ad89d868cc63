"""Log lines as callers read them: text, or one JSON object per line. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cortex.engine.log_files import STDERR, STDOUT, SUPERVISOR, LogLine

#: So many of the last lines are shown where nobody says how many, and may be asked for.
DEFAULT_TAIL, MAX_TAIL = 1000, 1_000_000
_STREAMS = {STDOUT: "stdout", STDERR: "stderr", SUPERVISOR: "supervisor"}
#: How `cortex_internal.lib.log.logger` begins a line.
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
#: How a supervisor's line of a death ends, in `take_inside` of its workers.
_INSIDE = re.compile(r", inside: (?:request|workload|batch) (\S+(?:, \S+)*)$")


@dataclass(frozen=True)
class LogForm:
    """Which lines of replicas are shown, and how."""

    is_json: bool = False
    request: str | None = None  #: only lines that were printed for this request, and of deaths with it inside

    def takes(self, line: LogLine) -> bool:
        """Tell whether a line is shown."""
        return self.request in (None, line.request_id) or self.request in _inside(line)

    def show(self, line: LogLine) -> str:
        """Return a line with its line break."""
        return f"{_as_json(line)}\n" if self.is_json else f"{line.at} {line.replica.rsplit('-', 1)[-1]} {line.text}\n"


def _inside(line: LogLine) -> list[str]:
    """Name the requests that were inside a process that died; of any other line none."""
    found = _INSIDE.search(line.text) if line.stream == SUPERVISOR else None
    return found[1].split(", ") if found else []


def _as_json(line: LogLine) -> str:
    level = _LEVEL.match(line.text) if line.stream == STDOUT else None
    fields: dict[str, Any] = {
        "time": line.at,
        "replica": line.replica,
        "process": line.process,
        "stream": _STREAMS.get(line.stream, line.stream),
    }
    if level:
        fields["level"] = level[1].lower()
    fields["message"] = line.text[level.end() :] if level else line.text
    if line.request_id:
        fields["request_id"] = line.request_id
    return json.dumps(fields, ensure_ascii=False)


def show_access(fields: Mapping[str, Any], is_json: bool) -> str:
    """Return a line of the access log with its line break."""
    if is_json:
        return f"{json.dumps(fields, ensure_ascii=False)}\n"
    first = [str(fields[name]) for name in ("time", "status", "method", "path") if name in fields]
    rest = [
        f"{name}={value}" for name, value in fields.items() if name not in ("time", "status", "method", "path", "api")
    ]
    return " ".join([*first, *rest]) + "\n"
