"""`cortex check`: everything that can be known before a deploy, without an operator."""

from __future__ import annotations

import argparse
from pathlib import Path

from cortex.cli.context import Context
from cortex.cli.report import located
from cortex.client.package import DEFAULT_CONFIG, find_config
from cortex.control.diagnose import diagnose
from cortex.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=DEFAULT_CONFIG, help="configuration file, or the folder it is in"
    )


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Print every mistake, or what would be deployed."""
    file = find_config(Path(arguments.config))
    try:
        diagnosis = diagnose(file, file.name)
    except ConfigError as error:
        raise located(error, file.parent) from None
    count = len(diagnosis.project.files)
    for api in diagnosis.apis:
        context.console.line(f"{api.name} ({api.kind}): no mistakes found")
    context.console.line(f"{count} file{'s' if count != 1 else ''} would be uploaded")
    return 0
