"""`cortex serve`: deploy a model as an API of this machine, without a project."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from cortex.cli.commands.projects.deploy import ca_option, upload
from cortex.cli.model_request import model_lines, model_request
from cortex.cli.rollout import report_failure, show_docs, wait
from cortex.cli.session import Session
from cortex.client.client import Client
from cortex.client.environments import LOCAL
from cortex.client.packaging import DEFAULT_CONFIG, dump_specs, pack_file
from cortex.config.schema import ANY_MODEL, MAX_NAME_LENGTH, STORES
from cortex.config.values import dashed
from cortex.errors import ConfigError, InputError, ModelFormatError, NotFoundError, OperatorUnavailableError
from cortex.models.formats.detection import Detection, check_signature, detect
from cortex.payloads.json_object import Json
from cortex.spelling import nearest


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model", metavar="PATH", help="the model: a file, a folder, or a folder of versions; here, s3:// or gs://"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the API; default: that of the file or folder")
    parser.add_argument(
        "--type",
        choices=(ANY_MODEL, "onnx", "tensorflow"),
        default=ANY_MODEL,
        help="format of the model; default: model, which detects it by the content of the files",
    )
    parser.add_argument(
        "--trust", choices=("pickle",), help="load joblib and pickle files, and other models that can run code"
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Deploy the model and wait until it answers; return 0 if it does."""
    location = _location(arguments.model)
    detection = None if location.startswith(STORES) else _detect(location, arguments)
    name = arguments.name or _name(location)
    client = session.client(LOCAL)
    _check_name_is_free(client, name, location)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / DEFAULT_CONFIG
        file.write_text(dump_specs([_api(name, location, arguments)]))
        try:
            (result,) = upload(client, pack_file(file), file, False, session, dict(session.environ))
        except ConfigError as error:  # its lines are of a file that the user does not have
            raise InputError("; ".join(_message(item.message, item.fix) for item in error.diagnostics)) from None
    if result["error"]:
        raise InputError(result["error"])
    if detection is not None:
        session.console.line(detection.reason)
    if result["installs"]:
        session.console.line(f"installing {', '.join(result['installs'])} into the environment of {name}")
    try:
        outcome = wait(client, name, session)
    except KeyboardInterrupt:
        session.console.note(f"the deployment continues; `cortex delete {name}` stops it")
        raise
    if outcome is None:
        raise NotFoundError(f"{name} was deleted")
    if not outcome.is_live:
        report_failure(outcome.api, session)
        return 1
    _report(outcome.api, outcome.seconds, detection, client, session)
    return 0


def _location(written: str) -> str:
    """Return a location of a store as it is, and a path as an absolute one. Raises: InputError."""
    if written.startswith(STORES):
        return written
    if "://" in written:
        raise InputError(f"{written}: must be a path, or start with s3:// or gs://")
    path = Path(written).expanduser().absolute()
    if ".." in path.parts:
        path = path.resolve()
    if not path.exists():
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        guess = nearest(path.name, beside)
        hint = f"did you mean {Path(written).parent / guess}?" if guess else "give the path of a model"
        raise InputError(f"{written}: no such file or folder; {hint}")
    return str(path)


def _detect(location: str, arguments: argparse.Namespace) -> Detection:
    """Detect the format of a model on this machine. Raises: InputError."""
    try:
        found = detect(location)
        if arguments.type == ANY_MODEL:
            check_signature(found)
    except ModelFormatError as error:
        raise InputError(str(error)) from None
    if found.needs_trust and arguments.trust is None:
        raise InputError(f"{found.reason}; {found.code}; use --trust pickle if you trust its author")
    if arguments.type not in (ANY_MODEL, found.format):
        raise InputError(f"{found.reason}, not of type {arguments.type}; remove --type")
    return found


def _name(location: str) -> str:
    """Derive the name of an API from a file or folder; that of a version is the name of the folder around it."""
    *parents, last = [part for part in location.split("/") if part]
    stem = last if last.isdecimal() else last.rpartition(".")[0] or last
    if stem.isdecimal() and parents:
        stem = parents[-1]
    name = dashed(stem).lstrip("-0123456789")[:MAX_NAME_LENGTH].rstrip("-")
    if not name:
        raise InputError(f"{location}: its name can't be that of an API; give one with --name")
    return name


def _check_name_is_free(client: Client, name: str, location: str) -> None:
    """Raise InputError if an API with this name serves anything but this model: it must not be replaced."""
    try:
        deployed = client.get_api(name)
    except (NotFoundError, OperatorUnavailableError):
        return
    handler = deployed["spec"].get("handler") or {}
    if handler.get("path", "") is not None or (handler.get("models") or {}).get("path") != location:
        raise InputError(f"an API named {name} exists already; give another name with --name, or delete it")


def _api(name: str, location: str, arguments: argparse.Namespace) -> Json:
    models = {"path": location}
    if arguments.trust and arguments.type == ANY_MODEL:  # the other types load all files of theirs
        models["trust"] = arguments.trust
    return {"name": name, "kind": "RealtimeAPI", "handler": {"type": arguments.type, "models": models}}


def _message(message: str, fix: str) -> str:
    text = f"{message} ({fix})" if fix else message
    return text.replace("write `trust: pickle` if you trust it", "use --trust pickle if you trust its author")


def _report(api: Json, seconds: float, detection: Detection | None, client: Client, session: Session) -> None:
    console, name = session.console, api["spec"]["name"]
    models = api.get("models_without_code") or []  # operators of older versions lack it
    if detection is None:
        for model in models:
            console.line(model["found"])
    console.line(f"{name} is {console.styled('live', 'green')} ({seconds:.1f} s)")
    console.line(f"  endpoint: {api['endpoint']}")
    show_docs(api, session)
    for model in models:
        request = model_request(model, api["endpoint"], ca_option(client, session), has_others=len(models) > 1)
        for line in (*model_lines(model), request):
            console.line(f"  {line}")
    console.line(f"  `cortex delete {name}` stops it")
