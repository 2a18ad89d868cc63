"""`cortex restore`: restore a backup into an empty home."""

from __future__ import annotations

import argparse
from pathlib import Path

from cortex.cli.session import Session
from cortex.installation import Installation
from cortex.operator.bootstrap import lock_home
from cortex.state.home_backup import restore_backup


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="a file that `cortex backup` wrote")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Restore the backup. No operator starts meanwhile."""
    session.home.prepare()
    session.console.begin(f"restoring {arguments.file} into {session.home.path}")
    with lock_home(session.home):
        restore_backup(Path(arguments.file), session.home)
    session.console.line(f"restored into {session.home.path}; `cortex up` starts it")
    if Installation.read(session.home).database is not None:
        session.console.note("its databases are in PostgreSQL, and not in this file: restore them with pg_restore")
    return 0
