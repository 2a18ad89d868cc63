"""`cortex version`."""

from __future__ import annotations

import argparse

from cortex import __version__
from cortex.cli.arguments import add_output
from cortex.cli.context import Context


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Print it."""
    if arguments.output == "json":
        context.console.json({"version": __version__})
    else:
        context.console.line(__version__)
    return 0
