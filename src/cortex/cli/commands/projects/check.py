"""`cortex check`: validate a project before a deploy, without an operator."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from cortex.cli.arguments import add_config, read_sample
from cortex.cli.output import located
from cortex.cli.session import Session
from cortex.client.packaging import find_config
from cortex.errors import ConfigError, InputError
from cortex.lifecycle import ApiKind
from cortex.operator.deploy.diagnose import Diagnosis, Machine, diagnose

_NO_SAMPLE = {
    ApiKind.ASYNC: "is an AsyncAPI, which does not respond with a result",
    ApiKind.BATCH: "runs jobs and serves no requests",
    ApiKind.TASK: "runs jobs and serves no requests",
    ApiKind.SPLITTER: "has no code",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config(parser)
    parser.add_argument("--sample", metavar="SAMPLE", help="start each API once and send it this file as a request")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Report all mistakes, or the APIs and number of files that a deploy would upload."""
    file = find_config(Path(arguments.config))
    try:
        diagnosis = diagnose(file, file.name, machine=Machine(session.environ))
    except ConfigError as error:
        raise located(error, file.parent) from None
    for warning in diagnosis.warnings:
        session.console.note(f"warning: {replace(warning, file=str(file.parent / warning.file))}")
    if arguments.sample:
        return _send_sample(diagnosis, arguments.sample, session)
    for api in diagnosis.apis:
        session.console.line(f"{api.name} ({api.kind}): no mistakes found")
        if installs := diagnosis.installs.get(api.name):
            session.console.line(f"  also installs: {', '.join(installs)}")
    count = len(diagnosis.project.files)
    session.console.line(f"{count} file{'s' if count != 1 else ''} would be uploaded")
    return 0


def _send_sample(diagnosis: Diagnosis, sample: str, session: Session) -> int:
    """Print the response of each API and, for an error response, its log. Raises: InputError."""
    body, content_type = read_sample(sample)
    answering = tuple(api for api in diagnosis.apis if api.kind is ApiKind.REALTIME)
    for api in diagnosis.apis:
        if api not in answering:
            session.console.note(f"{api.name} {_NO_SAMPLE[api.kind]}; the sample is not sent to it")
    if not answering:
        raise InputError("--sample requires an API that serves requests; use `cortex submit` for an API that runs jobs")
    diagnosis = replace(diagnosis, apis=answering)
    from cortex.cli.sample_run import run_sample  # noqa: PLC0415 - imports the engine, which a check does not need

    session.console.progress("sending the sample")
    failed = False
    for result in run_sample(session.home, session.environ, diagnosis, body, content_type):
        failed = failed or result.status >= 400
        for finding in result.findings:
            session.console.note(f"{result.api}: {finding}")
        for line in result.log if result.status >= 400 else ():
            session.console.note(line)
        session.console.line(f"{result.api} responds with status {result.status}: {result.body}")
    return 1 if failed else 0
