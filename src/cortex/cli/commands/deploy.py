"""`cortex deploy`: pack, upload, wait until live, say how to call it or why not."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from cortex.cli.arguments import add_env, add_output
from cortex.cli.connect import client_of, start_local_operator
from cortex.cli.context import Context
from cortex.cli.report import located
from cortex.client.client import Client
from cortex.client.packaging import DEFAULT_CONFIG, Package, find_config, pack_file
from cortex.errors import ConfigError, InputError, NotFoundError, OperatorUnavailableError
from cortex.lifecycle import ApiKind

_SAMPLE_NAME = "sample.json"
#: What `cortex submit` is given, by the kinds that run jobs.
_SUBMISSIONS = {ApiKind.BATCH: " JOB.json", ApiKind.TASK: ""}
#: How often the line of progress is written anew on a terminal; elsewhere the operator is asked to hold the question.
_PROGRESS_S = 0.5
_POLL_S = 30.0

Result = dict[str, str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=DEFAULT_CONFIG, help="configuration file, or the folder it is in"
    )
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="deploy also while an update is going on")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask about an unusually big project")
    add_output(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the APIs are live")


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Deploy; the exit code tells whether every API became live."""
    as_json = arguments.output == "json"
    file = find_config(Path(arguments.config))
    client = client_of(context, arguments.env)
    try:
        package = pack_file(file)
        _confirm(package, arguments.yes, context)
        results = _upload(client, package, arguments.force, context)
    except ConfigError as error:
        if as_json:
            context.console.json(_refusals(error, file.parent))
        raise located(error, file.parent) from None
    try:
        for result in results if not as_json else ():
            _tell(result, context)
        if not arguments.no_wait:
            results = [_wait(client, result, file.parent, context, as_json) for result in results]
    except KeyboardInterrupt:
        context.console.note("the deploy goes on; `cortex get` shows how")
        raise
    if as_json:
        context.console.json(results)
    return 1 if any(result["error"] for result in results) else 0


def _upload(client: Client, package: Package, force: bool, context: Context) -> list[Result]:
    try:
        return client.upload(package, force)
    except OperatorUnavailableError:
        if not start_local_operator(client, context):
            raise
    context.console.progress("uploading the project")
    return client.upload(package, force)


def _confirm(package: Package, yes: bool, context: Context) -> None:
    """Ask about a big project. Raises: InputError if the answer is no, or nobody is there to give one."""
    if yes or not package.warnings:
        return
    for warning in package.warnings:
        context.console.note(f"warning: {warning}; .cortexignore can leave files out")
    if not sys.stdin or not sys.stdin.isatty():
        raise InputError("the project is unusually big; deploy it with --yes")
    context.console.err.write("deploy it all the same? [y/N] ")
    context.console.err.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("nothing was deployed")


def _tell(result: Result, context: Context) -> None:
    if result["error"]:
        context.console.error(f"{result['api']}: {result['error']}")
    else:
        context.console.line(result["message"])
        context.console.flush()


def _wait(client: Client, result: Result, folder: Path, context: Context, as_json: bool) -> Result:
    """Wait until an API is live or can't become so; return its result with the reason."""
    if result["error"]:
        return result
    began = time.monotonic()
    poll_s = _PROGRESS_S if context.console.err_is_terminal else _POLL_S
    while True:
        try:
            api = client.wait_api(result["api"], poll_s)
        except NotFoundError:  # it was deleted: by this deploy, or by someone meanwhile
            return result
        status = api["status"]
        if status["status_code"] != "updating":
            break
        context.console.progress(_progress(result["api"], status, time.monotonic() - began))
    if status["status_code"] == "live":
        if not as_json:
            _tell_live(api, folder, time.monotonic() - began, context)
        return result
    return {**result, "error": _tell_failure(result["api"], status, context)}


def _progress(name: str, status: dict[str, Any], seconds: float) -> str:
    counts = status["replica_counts"]
    ready = f", {counts['updated']['ready']} of {counts['requested']} ready" if counts["requested"] else ""
    return f"{name}: {status['message']}{ready}, {seconds:.0f} s"


def _tell_live(api: dict[str, Any], folder: Path, seconds: float, context: Context) -> None:
    console = context.console
    name, endpoint = api["spec"]["name"], api["endpoint"]
    console.line(f"{name} is {console.styled('live', 'green')} ({seconds:.1f} s)")
    console.line(f"  endpoint: {endpoint}")
    if (submission := _SUBMISSIONS.get(api["spec"].get("kind"))) is not None:
        console.line(f"  cortex submit {name}{submission} --watch")
        return
    key = ' -H "X-API-Key: $CORTEX_API_KEY"' if api["spec"].get("networking", {}).get("auth") == "api_key" else ""
    console.line(f"  curl {shlex.quote(endpoint)}{key} -H 'content-type: application/json' -d {_sample(folder)}")
    if key:
        console.line(f"  cortex keys create NAME --api {name}")


def _sample(folder: Path) -> str:
    file = folder / _SAMPLE_NAME
    return shlex.quote(f"@{file}") if file.is_file() else shlex.quote(json.dumps({}))


def _tell_failure(name: str, status: dict[str, Any], context: Context) -> str:
    failure = status.get("failure") or {}
    if failure.get("traceback"):
        context.console.note(failure["traceback"].rstrip())
    reason = str(failure.get("message") or status["message"])
    context.console.error(f"{name} can't become live: {reason}")
    if status["replica_counts"]["stale"]["ready"]:
        context.console.note(f"the version of {name} that was live before still serves")
    context.console.note(f"`cortex logs {name}` shows what it wrote; deploy again once it is corrected")
    return reason


def _refusals(error: ConfigError, folder: Path) -> list[Result]:
    return [
        {"api": item.path.partition(".")[0], "message": "", "error": str(item)}
        for item in located(error, folder).diagnostics
    ]
