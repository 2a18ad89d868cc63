"""`cortex patch`: change the configuration of deployed APIs without their code."""

from __future__ import annotations

import argparse
from pathlib import Path

from cortex.cli.arguments import add_config, add_env, add_output
from cortex.cli.output import located
from cortex.cli.rollout import show_result
from cortex.cli.session import Session
from cortex.client.packaging import find_config, read_config
from cortex.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config(parser)
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="patch even if an update is in progress")
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Send the file and print the result for each API."""
    file = find_config(Path(arguments.config))
    client = session.client(arguments.env)
    try:
        results = client.patch_text(read_config(file), arguments.force)
    except ConfigError as error:
        raise located(error, file.parent, file.name) from None
    if arguments.output == "json":
        session.console.json(results)
    else:
        for result in results:
            show_result(result, session)
    return 1 if any(result["error"] for result in results) else 0
