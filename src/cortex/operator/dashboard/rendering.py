"""Render the pages of the dashboard from their templates; all values are escaped.

Text of users may contain anything: `printable` removes the escape codes of terminals, and autoescaping does the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from cortex import __version__
from cortex.errors import CortexError, NotFoundError
from cortex.masking import mask_secrets
from cortex.operator.dashboard.security import PREFIX, permits
from cortex.operator.dashboard.sessions import DashboardSession

_STATIC = {"dashboard.css": "text/css", "dashboard.js": "text/javascript", "icon.svg": "image/svg+xml"}
#: Escape sequences of terminals (ECMA-48): CSI, OSC, and those of one character.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROLS = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)} | {0x7F: "␡"}
#: Characters that change the direction of text, with which a line could look like another one.
_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F], "�")
_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000), "�")  # halves of characters, which JSON may contain and UTF-8 can't
#: Larger JSON is not shown.
MAX_JSON_BYTES = 256 * 1024
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class NavigationItem:
    """A page in the navigation; it is shown if the session's token permits its path."""

    title: str
    path: str
    section: str = ""  #: paths that begin with it belong to this page, too


#: The navigation, in its order.
NAVIGATION = (
    NavigationItem("APIs", f"{PREFIX}/", f"{PREFIX}/apis/"),
    NavigationItem("Jobs", f"{PREFIX}/jobs", f"{PREFIX}/jobs/"),
    NavigationItem("Workloads", f"{PREFIX}/workloads", f"{PREFIX}/workloads/"),
    NavigationItem("Schedules", f"{PREFIX}/schedules"),
    NavigationItem("Cluster", f"{PREFIX}/cluster"),
    NavigationItem("API keys", f"{PREFIX}/keys", f"{PREFIX}/keys/"),
    NavigationItem("Tokens", f"{PREFIX}/tokens", f"{PREFIX}/tokens/"),
    NavigationItem("Audit", f"{PREFIX}/audit"),
)


class Pages:
    """Renders templates. `installation` is shown as the name of this installation."""

    def __init__(self, installation: str) -> None:
        self._installation = installation

    def page(self, request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
        """Return a page. In the template, `may(method, path)` is true if the session's token permits a request."""
        session: DashboardSession | None = getattr(request.state, "session", None)
        path = request.scope["path"]

        def may(method: str, path: str) -> bool:
            return session is not None and permits(session.principal, method, path)

        text = (
            _environment()
            .get_template(template)
            .render(
                values,
                session=session,
                notice=session.pop_notice() if session and request.headers.get("x-live") is None else "",
                navigation=[(item, _is_current(item, path)) for item in NAVIGATION if may("GET", item.path)],
                may=may,
                path=path,
                query=request.query_params,
                installation=self._installation,
                version=__version__,
                now=datetime.now(UTC),
            )
        )
        return HTMLResponse(text, status)

    def error(self, request: Request, error: CortexError) -> Response:
        """Return the page of an error."""
        request.state.error = str(error)
        return self.page(request, "error.html", error.http_status, error=error)


def done(request: Request, path: str, notice: str) -> Response:
    """Return the response to a change: the browser opens a page, which shows the notice once."""
    session: DashboardSession = request.state.session
    session.notice = notice
    return RedirectResponse(path, 303)


def static_file(name: str, request: Request) -> Response:
    """Return the stylesheet, the script or the icon. Raises: NotFoundError."""
    if name not in _STATIC:
        raise NotFoundError(f"the dashboard has no file {name[:100]!r}")
    content, etag = _load(name)
    headers = {"cache-control": "public, max-age=86400" if "v" in request.query_params else "no-cache", "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_STATIC[name])


def _is_current(item: NavigationItem, path: str) -> bool:
    return path == item.path or bool(item.section and path.startswith(item.section))


@cache
def _load(name: str) -> tuple[bytes, str]:
    content = resources.files(__package__ or "").joinpath("static", name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def _static_url(name: str) -> str:
    return f"{PREFIX}/static/{name}?v={_load(name)[1].strip(chr(34))}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__ or "", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "ago": ago,
        "bytes": size,
        "count": count,
        "duration": duration,
        "from_unix": from_unix,
        "iso": iso,
        "masked": mask_secrets,
        "milliseconds": milliseconds,
        "number": number,
        "percent": percent,
        "printable": printable,
        "yaml": as_yaml,
    }
    environment.globals["static"] = _static_url
    return environment


# Filters.


def number(value: float | None, unit: str = "") -> str:
    """Return a number with three digits at most: `0.25`, `12.3`, `1.2k`; `–` if it is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    for limit, letter in _UNITS:
        if abs(value) >= limit:
            return f"{_short(value / limit)}{letter}{unit}"
    return f"{_short(value)}{unit}"


def count(value: int) -> str:
    """Return a whole number: `12,345`."""
    return f"{value:,}"


def milliseconds(seconds: float | None) -> str:
    """Return a duration: `0.4 ms`, `12 ms`, `1.5 s`; `–` if it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    return f"{_short(seconds)} s" if seconds >= 1 else f"{_short(seconds * 1000)} ms"


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: `40 s`, `3 min 20 s`, `2 h 5 min`, `4 d 1 h`; `–` if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{_short(max(0.0, seconds))} s"
    for length, unit, part, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= length:
            rest = int(seconds % length) // part
            return f"{int(seconds // length)} {unit}{f' {rest} {name}' if rest else ''}"
    raise AssertionError(seconds)


def percent(value: float | None) -> str:
    """Return a part of one as percent."""
    return "–" if value is None or not math.isfinite(value) else f"{_short(value * 100)}%"


def size(value: float | None) -> str:
    """Return a number of bytes: `1.5 GiB`."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{_short(value)} {unit}"
        value /= 1024
    return f"{_short(value)} TiB"


def ago(moment: datetime | str | None, now: datetime) -> str:
    """Return the time since a moment: `5 s ago`, `3 min ago`, `2 h ago`, `4 d ago`, or until it: `in 3 min`."""
    if not moment:
        return "–"
    seconds = (now - _moment(moment)).total_seconds()
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= length:
            text = f"{int(abs(seconds) // length)} {unit}"
            break
    else:
        text = f"{int(abs(seconds))} s"
    return f"{text} ago" if seconds >= 0 else f"in {text}"


def from_unix(seconds: float) -> datetime:
    """Return a moment given in UNIX seconds."""
    return datetime.fromtimestamp(seconds, UTC)


def iso(moment: datetime | str) -> str:
    """Return a moment in UTC, for `<time>`."""
    return _moment(moment).astimezone(UTC).isoformat(timespec="seconds")


def printable(text: object) -> str:
    """Return text of users without escape codes; other control characters become visible ones."""
    return _ESCAPES.sub("", str(text)).translate(_CONTROLS)


def as_yaml(data: object) -> str:
    """Return JSON data as YAML."""
    return yaml.safe_dump(json.loads(json.dumps(data)), sort_keys=False, allow_unicode=True, width=100).strip()


def shown_json(content: bytes) -> str:
    """Return JSON as indented text with its secrets masked; "" if it is large or can't be parsed."""
    if len(content) > MAX_JSON_BYTES:
        return ""
    try:
        return json.dumps(mask_secrets(json.loads(content)), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):  # the secrets of such text are unknown, so it is not shown
        return ""


def _moment(moment: datetime | str) -> datetime:
    found = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _short(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
