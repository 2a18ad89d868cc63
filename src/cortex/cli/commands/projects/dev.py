"""`cortex dev`: serve a project in this terminal, and reload it when its files change."""

from __future__ import annotations

import argparse
from pathlib import Path

from cortex.cli.arguments import add_config, read_sample
from cortex.cli.output import located
from cortex.cli.session import Session
from cortex.client.packaging import find_config
from cortex.errors import ConfigError, InputError

_MAX_PORT = 65535


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    parser.add_argument("--port", type=int, help="port to listen on; default: the first free one from 8888 on")
    parser.add_argument(
        "--sample", metavar="SAMPLE", help="send this file as a request after each change, and compare the responses"
    )
    parser.add_argument(
        "--debugpy", metavar="PORT", type=int, help="let editors attach their debugger at this port, with debugpy"
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Serve until Ctrl-C."""
    file = find_config(Path(arguments.config))
    for option, port in (("--port", arguments.port), ("--debugpy", arguments.debugpy)):
        if port is not None and not 0 <= port <= _MAX_PORT:
            raise InputError(f"{option} {port}: must be a port, from 0 to {_MAX_PORT}")
    sample = read_sample(arguments.sample) if arguments.sample else None
    session.console.note(f"reading {file}")
    from cortex.dev.session import SessionSettings, run_session  # noqa: PLC0415 - `--help` needs none of it
    from cortex.dev.terminal import Terminal  # noqa: PLC0415 - likewise

    settings = SessionSettings(
        file, session.home, session.environ, arguments.host, arguments.port, arguments.debugpy, sample
    )
    console = session.console
    try:
        run_session(settings, Terminal(console.has_colors and console.err_is_terminal))
    except ConfigError as error:
        raise located(error, file.parent) from None
    return 0
