"""`cortex deploy`: pack and upload a project, wait until its APIs are live, and report the outcome."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from cortex.cli.arguments import add_config, add_env, add_output
from cortex.cli.model_request import model_requests
from cortex.cli.output import located
from cortex.cli.rollout import report_failure, show_docs, show_result, wait
from cortex.cli.session import Session
from cortex.cli.tables.canary import canary_notes
from cortex.cli.tables.scaling import room_note, shortage_note
from cortex.client.client import Client, needs_key
from cortex.client.environments import LOCAL
from cortex.client.packaging import Package, find_config, pack_file
from cortex.errors import ConfigError, CortexError, InputError, OperatorUnavailableError
from cortex.installation import read_operator
from cortex.lifecycle import ApiKind
from cortex.payloads.json_object import Json
from cortex.projects.key_files import find_packed_key_files

#: File with a submission, as `cortex init` writes it.
_JOB_NAME = "job.json"
#: Arguments of `cortex submit` in the hint for kinds that run jobs.
_SUBMISSIONS = {ApiKind.BATCH: " JOB.json", ApiKind.TASK: ""}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config(parser)
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="deploy even if an update is in progress")
    parser.add_argument(
        "-y", "--yes", action="store_true", help="do not ask for confirmation of an unusually large project"
    )
    add_output(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the APIs are live")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Deploy the APIs; return 0 if all become live."""
    as_json = arguments.output == "json"
    file = find_config(Path(arguments.config))
    client = session.client(arguments.env)
    try:
        package = pack_file(file)
        for found in find_packed_key_files(package.archive):
            if found.path != package.config_name:
                warning = f"{found.path} has {found.what}; list it in .cortexignore unless code needs it"
                session.console.note(f"warning: {warning}")
        _confirm(package, arguments.yes, session)
        results = upload(client, package, file, arguments.force, session)
    except ConfigError as error:
        if as_json:
            session.console.json(_refusals(error, file.parent))
        raise located(error, file.parent) from None
    try:
        for result in results if not as_json else ():
            show_result(result, session)
        if not arguments.no_wait:
            began = time.monotonic()
            results = [_wait(client, result, file.parent, session, as_json, began) for result in results]
    except KeyboardInterrupt:
        session.console.note("the deployment continues; `cortex get` shows its status")
        raise
    if as_json:
        session.console.json(results)
    return 1 if any(result["error"] for result in results) else 0


def upload(
    client: Client,
    package: Package,
    file: Path,
    force: bool,
    session: Session,
    environ: Mapping[str, str] | None = None,
) -> list[Json]:
    """Upload a project; start the operator of this machine if it is the one to upload to, and does not run.

    The project is checked while the operator's process imports its modules; a mistake ends that. With `environ`, which
    has the credentials for buckets, the models are checked, too.
    """
    try:
        return client.upload(package, force)
    except OperatorUnavailableError:
        if not session.is_local(client):
            raise

    def check() -> None:  # a mistake must not leave an operator running
        # Slow to import, and needed only without an operator.
        from cortex.operator.deploy.diagnose import Machine, diagnose  # noqa: PLC0415

        diagnose(file, file.name, machine=None if environ is None else Machine(environ))

    session.start_local_operator(check)
    session.console.progress("uploading the project")
    return client.upload(package, force)


def _confirm(package: Package, yes: bool, session: Session) -> None:
    """Ask for confirmation of a large project. Raises: InputError if it is declined or there is no terminal."""
    if yes or not package.warnings:
        return
    for warning in package.warnings:
        session.console.note(f"warning: {warning}; list files in .cortexignore to exclude them")
    if not session.is_interactive:
        raise InputError("the project is unusually large; use --yes to deploy it without confirmation")
    if not session.confirm("deploy it anyway?"):
        raise InputError("nothing was deployed")


def _wait(client: Client, result: Json, folder: Path, session: Session, as_json: bool, began: float) -> Json:
    """Wait until an API is live or has failed; return its result, with the error if there is one."""
    if result["error"] or (outcome := wait(client, result["api"], session, began)) is None:
        return result
    if not outcome.is_live:
        return {**result, "error": report_failure(outcome.api, session)}
    if not as_json:
        _report_live(outcome.api, folder, outcome.seconds, client, session)
    return result


def _ca_file(client: Client, session: Session) -> str:
    """Return the file of certificates with which curl trusts the gateway; "" if it needs none."""
    local = read_operator(session.home) if client.environment.name == LOCAL else None
    return local.tls_cert if local else client.environment.connect().trust.ca


def ca_option(client: Client, session: Session) -> str:
    """Return the option with which curl trusts the gateway; "" if it needs none."""
    ca_file = _ca_file(client, session)
    return f" --cacert {shlex.quote(ca_file)}" if ca_file else ""


def _report_live(api: Json, folder: Path, seconds: float, client: Client, session: Session) -> None:
    from cortex.cli.sample_request import key_option, sample_request  # noqa: PLC0415 - takes time, in which an operator can start

    console = session.console
    name, endpoint = api["spec"]["name"], api["endpoint"]
    console.line(f"{name} is {console.styled('live', 'green')} ({seconds:.1f} s)")
    for line in canary_notes(api):
        console.line(f"  {line}")
    console.line(f"  endpoint: {endpoint}")
    show_docs(api, session)
    if note := shortage_note(api) or room_note(api):
        console.line(f"  {note}")
    if (submission := _SUBMISSIONS.get(api["spec"].get("kind"))) is not None:
        job = folder / _JOB_NAME
        given = f" {shlex.quote(str(job))}" if job.is_file() else submission
        console.line(f"  cortex submit {name}{given} --watch")
        return
    models = api.get("models_without_code") or []  # operators of older versions lack it
    lines = model_requests(models, endpoint, ca_option(client, session) + key_option(api)) or sample_request(
        api, folder, _ca_file(client, session), lambda: _document(name, client)
    )
    for line in lines:
        console.line(f"  {line}")
    if needs_key(api):
        console.line(f"  cortex keys create NAME --api {name}")


def _document(api: str, client: Client) -> Json:
    """Return the OpenAPI document of an API; an empty one if it publishes none, or only to callers with a key."""
    try:
        return client.get_openapi(api)
    except (CortexError, OSError, ValueError):
        return {}


def _refusals(error: ConfigError, folder: Path) -> list[Json]:
    return [
        {"api": item.path.partition(".")[0], "message": "", "error": str(item), "changes": [], "installs": []}
        for item in located(error, folder).diagnostics
    ]
