"""`cortex check`: everything that can be known before a deploy, without an operator."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from cortex.cli.context import Context
from cortex.cli.report import located
from cortex.cli.samples import read_sample
from cortex.client.packaging import DEFAULT_CONFIG, find_config
from cortex.errors import ConfigError, InputError
from cortex.lifecycle import ApiKind
from cortex.operator.deploy.diagnose import Diagnosis, Machine, diagnose

_NOT_TRIED = {
    ApiKind.ASYNC: "answers later",
    ApiKind.BATCH: "runs jobs and answers no request",
    ApiKind.TASK: "runs jobs and answers no request",
    ApiKind.SPLITTER: "has no code",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=DEFAULT_CONFIG, help="configuration file, or the folder it is in"
    )
    parser.add_argument("--sample", metavar="SAMPLE", help="also start each API once and send it this file")


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Print every mistake, or what would be deployed."""
    file = find_config(Path(arguments.config))
    try:
        diagnosis = diagnose(file, file.name, machine=Machine(context.environ))
    except ConfigError as error:
        raise located(error, file.parent) from None
    if arguments.sample:
        return _try_sample(diagnosis, arguments.sample, context)
    for api in diagnosis.apis:
        context.console.line(f"{api.name} ({api.kind}): no mistakes found")
    count = len(diagnosis.project.files)
    context.console.line(f"{count} file{'s' if count != 1 else ''} would be uploaded")
    return 0


def _try_sample(diagnosis: Diagnosis, sample: str, context: Context) -> int:
    """Print each API's answer; where it is an error, what it wrote too. Raises: InputError."""
    body, content_type = read_sample(sample)
    answering = tuple(api for api in diagnosis.apis if api.kind is ApiKind.REALTIME)
    for api in diagnosis.apis:
        if api not in answering:
            context.console.note(f"{api.name} {_NOT_TRIED[api.kind]}: it is not tried")
    if not answering:
        raise InputError("--sample tries APIs that answer requests; `cortex submit` tries one that runs jobs")
    diagnosis = replace(diagnosis, apis=answering)
    # Loaded here, as commands are: it needs engine and operator, which a check by reading does not.
    trial: Any = importlib.import_module("cortex.cli.trial")
    context.console.progress("trying the sample")
    failed = False
    for tried in trial.try_sample(context.home, context.environ, diagnosis, body, content_type):
        failed = failed or tried.answer.status >= 400
        for line in tried.log if tried.answer.status >= 400 else ():
            context.console.note(line)
        answer = tried.answer.body.decode(errors="replace").rstrip()
        context.console.line(f"{tried.api} answers with status {tried.answer.status}: {answer}")
    return 1 if failed else 0
