"""Turns errors into what the user reads: the user's mistakes in full, ours in one line and a log."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cortex.cli.output import Console
from cortex.errors import ConfigError, CortexError, UserError
from cortex.home import Home

_LOG_NAME = "cli.log"


def report_error(error: CortexError, console: Console) -> None:
    """Write an error that has words of its own."""
    if isinstance(error, ConfigError):
        for diagnostic in error.diagnostics:
            console.note(str(diagnostic))
        count = len(error.diagnostics)
        console.error(f"{count} mistake{'s' if count != 1 else ''} found")
        return
    if isinstance(error, UserError) and error.traceback:
        console.note(error.traceback.rstrip())
    console.error(str(error))


def report_bug(error: Exception, home: Home, console: Console) -> None:
    """Write one line of an error that nobody expected, and all of it to `logs/cli.log`."""
    log = home.logs_dir / _LOG_NAME
    text = "".join(traceback.format_exception(error))
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"{datetime.now(UTC).isoformat()}\n{text}\n")
        where = f"; {log} has the details"
    except OSError:
        where = ""
    words = " ".join(str(error).split())
    console.error(f"internal error: {type(error).__name__}{': ' + words if words else ''}{where}")


def located(error: ConfigError, folder: Path, config_name: str | None = None) -> ConfigError:
    """Return the error with files named as seen from here, not from the project's folder.

    With `config_name`, every mistake is in that file, whatever the operator called it.
    """
    return ConfigError([replace(item, file=str(folder / (config_name or item.file))) for item in error.diagnostics])
