"""`cortex patch`: the configuration of deployed APIs without their code."""

from __future__ import annotations

import argparse
from pathlib import Path

from cortex.cli.arguments import add_env, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.cli.report import located
from cortex.client.packaging import DEFAULT_CONFIG, find_config, read_config
from cortex.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=DEFAULT_CONFIG, help="configuration file, or the folder it is in"
    )
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="patch also while an update is going on")
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Send the file and print what became of each API."""
    file = find_config(Path(arguments.config))
    client = client_of(context, arguments.env)
    try:
        results = client.patch_text(read_config(file), arguments.force)
    except ConfigError as error:
        raise located(error, file.parent, file.name) from None
    if arguments.output == "json":
        context.console.json(results)
    else:
        for result in results:
            if result["error"]:
                context.console.error(f"{result['api']}: {result['error']}")
            else:
                context.console.line(result["message"])
    return 1 if any(result["error"] for result in results) else 0
