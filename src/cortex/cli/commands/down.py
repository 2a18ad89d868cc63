"""`cortex down`: everything of this machine's installation, whether its operator still lives or not."""

from __future__ import annotations

import argparse

from cortex.cli.context import Context
from cortex.client.cleanup import stop_all
from cortex.telemetry import configure as configure_logs


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes: nothing."""


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Stop it; finding nothing to stop is fine."""
    context.home.check()
    if context.home.logs_dir.is_dir():
        configure_logs(context.home.logs_dir / "cli.log")
    context.console.progress("stopping replicas, gateway and operator")
    context.console.line("stopped" if stop_all(context.home) else "nothing was running")
    return 0
