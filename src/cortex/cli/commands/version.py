"""`cortex version`: print the version."""

from __future__ import annotations

import argparse

from cortex import __version__
from cortex.cli.arguments import add_output
from cortex.cli.session import Session


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Print the version."""
    if arguments.output == "json":
        session.console.json({"version": __version__})
    else:
        session.console.line(__version__)
    return 0
