"""`cortex dashboard`: print an address that opens the operator's dashboard once, and open it in a browser."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Mapping

from cortex.cli.arguments import add_env
from cortex.cli.session import Session

#: Variables without which Python would open a browser inside the terminal.
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_env(parser)
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Print the address, and open it."""
    url = session.client(arguments.env).create_dashboard_url()
    session.console.line(url)
    session.console.flush()
    if not arguments.no_browser and _has_browser(session.environ) and webbrowser.open(url):
        return 0
    session.console.note("open this address in a browser within a minute; it works once")
    return 0


def _has_browser(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in _DISPLAYS)
