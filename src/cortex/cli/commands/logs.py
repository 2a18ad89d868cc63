"""`cortex logs`: what the replicas of an API wrote, past ones too, or the workers of a job."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import UsageError, add_api, add_env, add_job, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.client.client import Client
from cortex.errors import NotFoundError
from cortex.lifecycle import ApiKind
from cortex.operator.http.log_format import DEFAULT_TAIL, MAX_TAIL


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser)
    add_job(parser)
    add_env(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what will be written")
    parser.add_argument(
        "--replica", metavar="ID", help="show only one replica, or one worker; `cortex status` lists their ids"
    )
    parser.add_argument("--tail", metavar="N", type=_lines, help=f"show the last N lines; {DEFAULT_TAIL} if not given")
    parser.add_argument(
        "--request", metavar="ID", help="show only what was printed for one request, and the death it was inside of"
    )
    parser.add_argument(
        "--access", action="store_true", help="show the gateway's line per request (`networking.access_log: true`)"
    )
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Print lines as they come."""
    client = client_of(context, arguments.env)
    options = (arguments.follow, arguments.replica, arguments.tail)
    as_json = arguments.output == "json"
    if arguments.job:
        if arguments.request or arguments.access:
            raise UsageError("the workers of a job serve no requests: --request and --access are for APIs")
        lines = client.job_logs(arguments.api, arguments.job, *options, as_json=as_json)
    else:
        _explain(client, arguments.api, arguments.access, context)
        more = {"request": arguments.request, "as_json": as_json, "access": arguments.access}
        lines = client.api_logs(arguments.api, *options, **more)
    count = 0
    for line in lines:
        count += 1
        context.console.line(line)
        if arguments.follow:
            context.console.flush()
    if not count:
        _explain_nothing(arguments, context)
    elif count == DEFAULT_TAIL and arguments.tail is None and not arguments.follow:
        context.console.note(f"only the last {DEFAULT_TAIL:,} lines; --tail N shows more")
    return 0


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= MAX_TAIL):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {MAX_TAIL:,} (got {text})")
    return int(text)


def _explain_nothing(arguments: argparse.Namespace, context: Context) -> None:
    """Say that a request or a replica was not found."""
    if arguments.tail == 0:
        return
    if arguments.request:
        what = "no line of the access log is of" if arguments.access else "nothing that is kept was printed for"
        context.console.note(
            f"{what} request {arguments.request}; ids are in X-Cortex-Request-ID of answers, "
            "of an AsyncAPI they are those of workloads, of a job those of batches"
        )
    elif arguments.replica and not arguments.access:
        what = "worker" if arguments.job else "replica"
        whole = " ".join(filter(None, ("cortex logs", arguments.api, arguments.job)))
        context.console.note(
            f"there is no {what} {arguments.replica} that has written anything, or its log is deleted; "
            f"each line of `{whole}` begins with its time and the id of its {what}"
        )


def _explain(client: Client, api: str, is_access: bool, context: Context) -> None:
    """Say why there may be nothing to see, and where it is."""
    try:
        spec = client.get_api(api)["spec"]
    except NotFoundError:  # deleted, say: its logs are there for a while
        return
    if spec["kind"] in (ApiKind.BATCH, ApiKind.TASK):
        # All it has itself is what its installation said.
        context.console.note(
            f"{api} runs jobs: `cortex get {api}` lists them, `cortex logs {api} JOB` shows what one wrote"
        )
    if spec["kind"] == ApiKind.SPLITTER:
        context.console.note(
            f"{api} has no logs: those of the APIs behind it, which `cortex get {api}` lists, have all"
        )
    elif is_access and not spec.get("networking", {}).get("access_log"):
        context.console.note(f"{api} writes no access log now: set networking.access_log: true and deploy")
