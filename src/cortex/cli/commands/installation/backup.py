"""`cortex backup`: write what an installation needs to exist again to one file, while it serves."""

from __future__ import annotations

import argparse
from pathlib import Path

from cortex import __version__
from cortex.cli.session import Session
from cortex.errors import format_size
from cortex.installation import Installation
from cortex.state.home_backup import OPTIONAL, write_backup


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="the new file; it contains tokens: only you can read it")
    parser.add_argument("--recordings", action="store_true", help="include the recordings in CORTEX_HOME")
    parser.add_argument("--models", action="store_true", help="include downloaded models")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Write the backup. The operator may run."""
    session.home.check()
    file = Path(arguments.file)
    session.console.begin(f"backing up {session.home.path}")
    write_backup(session.home, file, __version__, [name for name in OPTIONAL if getattr(arguments, name)])
    session.console.line(f"wrote {file} ({format_size(file.stat().st_size)})")
    if Installation.read(session.home).database is not None:
        session.console.note("the databases are in PostgreSQL, and not in this file: back them up with pg_dump")
    return 0
