"""Log lines as text or JSON. Pure and light: `cortex logs` imports it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortex.engine.log_writer import STDERR, STDOUT, SUPERVISOR
from cortex.terminal import without_overwritten

if TYPE_CHECKING:  # the command line imports this module, and `engine.logs` imports asyncio
    from cortex.engine.logs import LogLine

#: Default and maximum of `tail`.
DEFAULT_TAIL, MAX_TAIL = 1000, 1_000_000
_STREAMS = {STDOUT: "stdout", STDERR: "stderr", SUPERVISOR: "supervisor"}
#: Prefix of lines written with `cortex_internal.lib.log.logger`.
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
#: Ending of a supervisor's line about a process that died with requests inside it.
_INSIDE = re.compile(r", inside: (?:request|workload|batch) (\S+(?:, \S+)*)$")


@dataclass(frozen=True)
class LogForm:
    """Filter and format of a replica's log lines."""

    is_json: bool = False
    request: str | None = None  #: only lines of this request, and of deaths of a process that was serving it

    def matches(self, line: LogLine) -> bool:
        """Return True if the filter accepts a line."""
        return self.request in (None, line.request_id) or self.request in _requests_of_death(line)

    def format(self, line: LogLine) -> str:
        """Return a line with its line break."""
        return (
            f"{json.dumps(line_fields(line), ensure_ascii=False)}\n"
            if self.is_json
            else f"{line.at} {line.replica.rsplit('-', 1)[-1]} {without_overwritten(line.text)}\n"
        )


def format_access(fields: Mapping[str, Any], is_json: bool) -> str:
    """Return a line of the access log with its line break."""
    if is_json:
        return f"{json.dumps(fields, ensure_ascii=False)}\n"
    first = [str(fields[name]) for name in ("time", "status", "method", "path") if name in fields]
    rest = [
        f"{name}={value}" for name, value in fields.items() if name not in ("time", "status", "method", "path", "api")
    ]
    return " ".join([*first, *rest]) + "\n"


def _requests_of_death(line: LogLine) -> list[str]:
    """Return the ids of the requests that a process was serving when it died; empty for other lines."""
    found = _INSIDE.search(line.text) if line.stream == SUPERVISOR else None
    return found[1].split(", ") if found else []


def line_fields(line: LogLine) -> dict[str, Any]:
    """Return a line as the keys and values of its JSON object."""
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
    if line.trace_id:
        fields["trace_id"] = line.trace_id
    return fields
