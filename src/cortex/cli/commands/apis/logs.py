"""`cortex logs`: print the logs of an API's replicas, current and past, or of a job's workers."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import add_api, add_env, add_job, add_output
from cortex.cli.session import Session
from cortex.client.client import Client
from cortex.errors import NotFoundError, UsageError
from cortex.lifecycle import ApiKind
from cortex.operator.http.log_format import DEFAULT_TAIL, MAX_TAIL


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    add_job(parser)
    add_env(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="also print new lines as they are written")
    parser.add_argument(
        "--replica", metavar="ID", help="show only one replica or worker; `cortex status` lists their ids"
    )
    parser.add_argument("--tail", metavar="N", type=_lines, help=f"show the last N lines; default: {DEFAULT_TAIL}")
    parser.add_argument(
        "--request",
        metavar="ID",
        help="show only the lines of one request, including a crash of the worker that served it",
    )
    parser.add_argument(
        "--access",
        action="store_true",
        help="show the gateway's access log, one line per request (requires `networking.access_log: true`)",
    )
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Print the lines."""
    client = session.client(arguments.env)
    options = (arguments.follow, arguments.replica, arguments.tail)
    as_json = arguments.output == "json"
    has_note = False
    if arguments.job:
        if arguments.request or arguments.access:
            raise UsageError(
                "--request and --access require an API without a job: the workers of a job serve no requests"
            )
        lines = client.job_logs(arguments.api, arguments.job, *options, as_json=as_json)
    else:
        has_note = _print_notes(client, arguments.api, arguments.access, session)
        more = {"request": arguments.request, "as_json": as_json, "access": arguments.access}
        lines = client.api_logs(arguments.api, *options, **more)
    count = 0
    for line in lines:
        count += 1
        session.console.line(line)
        if arguments.follow:
            session.console.flush()
    if not count and not (has_note or arguments.tail == 0):
        _explain_no_lines(arguments, session)
    elif count == DEFAULT_TAIL and arguments.tail is None and not arguments.follow:
        session.console.note(f"only the last {DEFAULT_TAIL:,} lines are shown; use --tail N for more")
    return 0


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= MAX_TAIL):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {MAX_TAIL:,} (got {text})")
    return int(text)


def _explain_no_lines(arguments: argparse.Namespace, session: Session) -> None:
    """Print a note: there is no log yet, or the request or replica was not found."""
    if arguments.request:
        where = "the access log" if arguments.access else "the log"
        session.console.note(
            f"{where} has no lines of request {arguments.request}; the id of a request is in the X-Cortex-Request-ID "
            "header of its response; for an AsyncAPI it is the id of the workload, for a job that of the batch"
        )
    elif arguments.replica and not arguments.access:
        what = "worker" if arguments.job else "replica"
        whole = " ".join(filter(None, ("cortex logs", arguments.api, arguments.job)))
        session.console.note(
            f"no {what} {arguments.replica} has written a log, or the log was deleted; "
            f"each line of `{whole}` begins with its time and the id of its {what}"
        )
    elif arguments.access:
        session.console.note(f"the access log has no request to {arguments.api} yet")
    else:
        whose = f"job {arguments.job}" if arguments.job else arguments.api
        session.console.note(f"{whose} has written no log yet")


def _print_notes(client: Client, api: str, is_access: bool, session: Session) -> bool:
    """Print a note if the API itself has no logs of this kind; return whether it has none."""
    try:
        spec = client.get_api(api)["spec"]
    except NotFoundError:  # for example, it was deleted; its logs are kept for a while
        return False
    if spec["kind"] in (ApiKind.BATCH, ApiKind.TASK):
        # Its own log contains only the output of its installation.
        session.console.note(
            f"{api} runs jobs: `cortex get {api}` lists them, `cortex logs {api} JOB` shows the logs of one"
        )
        return True
    if spec["kind"] == ApiKind.SPLITTER:
        session.console.note(
            f"{api} is a TrafficSplitter and has no logs; see those of its APIs, which `cortex get {api}` lists"
        )
        return True
    if is_access and not spec.get("networking", {}).get("access_log"):
        session.console.note(f"{api} has no access log; set networking.access_log: true and deploy to enable it")
        return True
    return False
