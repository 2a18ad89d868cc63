"""`cortex init`: write a project that can be deployed as it is."""

from __future__ import annotations

import argparse
import shlex
from importlib.util import find_spec
from pathlib import Path

from cortex.cli.project_template import FRAMEWORKS, KINDS, PYTHON, project_files
from cortex.cli.session import Session
from cortex.errors import InputError
from cortex.lifecycle import ApiKind

_DEV = "cortex dev    # serves it in this terminal, and reloads it when a file is saved"
_NEXT = {
    ApiKind.REALTIME: "cortex predict {name} sample.json",
    ApiKind.ASYNC: "cortex predict {name} sample.json",
    ApiKind.BATCH: "cortex submit {name} job.json --watch",
    ApiKind.TASK: "cortex submit {name} --watch",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="name of the API and of its new folder; default: the current folder"
    )
    kinds = [kind.value for kind in KINDS]
    parser.add_argument(
        "--kind", metavar="KIND", type=_kind, choices=kinds, default=kinds[0], help=f"kind: {', '.join(kinds)}"
    )
    parser.add_argument(
        "--framework",
        metavar="FRAMEWORK",
        choices=tuple(FRAMEWORKS),
        default=PYTHON,
        help=f"framework of the model: {', '.join(FRAMEWORKS)}",
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Write the files and print the next commands. No file is overwritten."""
    folder = Path(arguments.name or ".")
    name = _api_name(arguments.name)
    kind = ApiKind(arguments.kind)
    module = FRAMEWORKS[arguments.framework].module
    files = project_files(name, kind, arguments.framework, not module or find_spec(module) is not None)
    for file in files:
        if (folder / file).exists() or (folder / file).is_symlink():
            raise InputError(f"{folder / file}: exists already; give the name of a new folder, or remove the file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
    except OSError as error:
        raise InputError(f"{folder}: can't be written: {error.strerror}") from None
    for file in files:
        session.console.line(f"wrote {folder / file}")
    if arguments.name:
        session.console.line(f"  cd {shlex.quote(str(folder))}")
    session.console.line(f"  {_DEV}")
    session.console.line("or, in the background, with the operator of this machine:")
    for command in ("cortex deploy", _NEXT[kind].format(name=name)):
        session.console.line(f"  {command}")
    return 0


def _kind(text: str) -> str:
    """Return the kind that is written in full or in short, such as `batch`."""
    kinds = {kind.removesuffix("API").lower(): kind.value for kind in KINDS}
    return kinds.get(text.lower().removesuffix("api"), text)


def _api_name(written: str | None) -> str:
    """Return the name of the API. Raises: InputError if the given name is invalid."""
    # Imported here: pydantic takes longer than the rest of this command, and completion loads every module.
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415

    from cortex.config.schema import MAX_NAME_LENGTH, ApiName  # noqa: PLC0415
    from cortex.config.values import dashed  # noqa: PLC0415

    if written is None:
        return dashed(Path.cwd().name).lstrip("-0123456789")[:MAX_NAME_LENGTH].rstrip("-") or "my-api"
    try:
        name = TypeAdapter(ApiName).validate_python(written)
    except ValidationError as error:
        context = error.errors()[0].get("ctx", {})
        raise InputError(f"{context['text']}; {context['fix']}") from None
    if len(name) > MAX_NAME_LENGTH or name.startswith("b-"):
        raise InputError(f'{name}: the name must not begin with "b-" or have more than {MAX_NAME_LENGTH} characters')
    return name
