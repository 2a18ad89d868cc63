"""`cortex feedback`: what was right, of predictions that an API made before."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import add_api, add_env, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.cli.job_progress import counted
from cortex.cli.output import printable
from cortex.cli.samples import read_sample


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser)
    parser.add_argument(
        "file",
        metavar="FILE",
        help='lines of JSON, {"request_id": …, "truth": …}, or a list of such objects; `-` is standard input',
    )
    add_env(parser)
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Send the file; the exit code tells whether every request in it was known."""
    body, _ = read_sample(arguments.file)
    answer = client_of(context, arguments.env).post_feedback(arguments.api, body)
    if arguments.output == "json":
        context.console.json(answer)
        return 1 if answer["unknown"] else 0
    judged = counted(answer["matched"], "prediction", "predictions")
    context.console.line(f"{judged} judged; `cortex get {arguments.api}` shows how right they are")
    if answer["unknown"]:
        some = ", ".join(map(printable, answer["unknown_ids"]))
        more = ", …" if answer["unknown"] > len(answer["unknown_ids"]) else ""
        what = counted(answer["unknown"], "request is", "requests are")
        context.console.error(f"{what} not known, or not any more: {some}{more}")
    return 1 if answer["unknown"] else 0
