"""`cortex feedback`: send the true values of earlier predictions."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import add_api, add_env, add_output, read_sample
from cortex.cli.output import format_count
from cortex.cli.session import Session
from cortex.terminal import printable


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    parser.add_argument(
        "file",
        metavar="FILE",
        help='JSON lines {"request_id": …, "truth": …} or a JSON list of such objects; `-` is standard input',
    )
    add_env(parser)
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Send the file; return 0 if the operator knows all of its request ids."""
    body, _ = read_sample(arguments.file)
    answer = session.client(arguments.env).post_feedback(arguments.api, body)
    if arguments.output == "json":
        session.console.json(answer)
        return 1 if answer["unknown"] else 0
    matched = format_count(answer["matched"], "prediction", "predictions")
    session.console.line(f"feedback recorded for {matched}; `cortex get {arguments.api}` shows the accuracy")
    if answer["unknown"]:
        some = ", ".join(map(printable, answer["unknown_ids"]))
        more = ", …" if answer["unknown"] > len(answer["unknown_ids"]) else ""
        what = format_count(answer["unknown"], "request id is", "request ids are")
        session.console.error(f"{what} unknown or expired: {some}{more}")
    return 1 if answer["unknown"] else 0
