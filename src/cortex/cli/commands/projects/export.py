"""`cortex export`: write the build context of a container image for a project, or its manifest for Kubernetes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cortex import __version__
from cortex.cli.arguments import add_config
from cortex.cli.output import located
from cortex.cli.session import Session
from cortex.client.packaging import find_config
from cortex.config.validate import check_file
from cortex.engine.environment import dependency_files
from cortex.errors import ConfigError, InputError, format_size
from cortex.export.context import BuildContext, build_image, check_wheel
from cortex.export.dockerfile import ImageOptions
from cortex.export.kubernetes import manifest
from cortex.export.plan import ImagePlan, image_name, plan_image
from cortex.export.secrets import secret_problems
from cortex.operator.deploy.diagnose import Diagnosis, Machine, diagnose
from cortex.projects.archive import name_problem
from cortex.projects.dotenv import DOTENV_NAME, read_dotenv


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config(parser)
    parser.add_argument("--out", metavar="DIR", help="folder for the build context: Dockerfile, compose.yaml and files")
    parser.add_argument("--build", action="store_true", help="also build the image, with docker, podman or buildah")
    parser.add_argument(
        "--kubernetes", action="store_true", help="print the manifest for Kubernetes: a Deployment and a Service"
    )
    parser.add_argument("--tag", metavar="IMAGE", help="name of the image (default: the project's folder, :latest)")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--base",
        metavar="IMAGE",
        default=f"python:{version}-slim",
        help="image to build on, with Python and pip (default: python:VERSION-slim with the version of Python here)",
    )
    parser.add_argument(
        "--extra", metavar="NAME", action="append", default=[], help="also install this extra of cortex-serving"
    )
    parser.add_argument("--wheel", metavar="FILE", help="install cortex from this wheel instead of a package index")
    parser.add_argument("--no-lock", action="store_true", help="do not lock the versions of the project's packages")
    parser.add_argument(
        "--allow-secret",
        metavar="NAME",
        action="append",
        default=[],
        help="a variable, a key or a file that looks like a secret, but may be in the image",
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Check the project; then write, print and build what is requested."""
    if not arguments.out and not arguments.kubernetes:
        raise InputError("give --out DIR to write a build context, or --kubernetes to print a manifest")
    if arguments.build and not arguments.out:
        raise InputError("--build requires --out DIR")
    file = find_config(Path(arguments.config))
    if problem := name_problem(file.name):
        raise InputError(f"{file}: {problem}; rename it")
    wheel = Path(arguments.wheel) if arguments.wheel else None
    options = ImageOptions(
        tag=arguments.tag or f"{image_name(file.resolve().parent.name)}:latest",
        base=arguments.base,
        version=check_wheel(wheel) if wheel else __version__,
        extras=tuple(dict.fromkeys(arguments.extra)),
        has_wheel=wheel is not None,
    )
    if arguments.out and not wheel and ("dev" in __version__ or "+" in __version__):
        raise InputError(
            f"this is the development version {__version__}, which no package index has: "
            "build a wheel (in a clone, `pip wheel --no-deps --wheel-dir dist .`), and give it with --wheel FILE"
        )
    try:
        diagnosis = _diagnose(file, session)
        plan = _plan(diagnosis, file, arguments.allow_secret)
    except ConfigError as error:
        raise located(error, file.parent) from None
    _print_notes(diagnosis, plan, session)
    if arguments.out:
        _write(arguments, session, diagnosis, plan, options, wheel, file)
    if arguments.kubernetes:
        session.console.line(manifest(plan, options.tag).rstrip("\n"))
    return 0


def _diagnose(file: Path, session: Session) -> Diagnosis:
    """Find mistakes, and the packages that follow from models. Raises: ConfigError, InputError."""
    found = diagnose(file, file.name)
    if not any(api.handler.models is not None for api in found.apis):
        return found  # programs of commands may exist only in the image
    return diagnose(file, file.name, machine=Machine(session.environ))


def _plan(diagnosis: Diagnosis, file: Path, allowed: list[str]) -> ImagePlan:
    project = diagnosis.project
    if problems := secret_problems(check_file(file, file.name, project), project, allowed):
        raise ConfigError(problems)
    return plan_image(
        diagnosis.apis,
        project,
        file.name,
        lambda name: (project.root / name).stat().st_size,
        lambda api: dependency_files(project.root, api.handler.dependencies),
    )


def _print_notes(diagnosis: Diagnosis, plan: ImagePlan, session: Session) -> None:
    if not plan.has_dotenv:
        return
    variables = read_dotenv(diagnosis.project.root, session.environ)
    names = ", ".join(variables)
    session.console.note(f"note: {DOTENV_NAME} is not part of the image; set these variables of containers: {names}")
    for api in diagnosis.apis:
        if both := sorted(variables.keys() & api.handler.env.keys()):
            shown = ", ".join(both)
            session.console.note(f"warning: the `env` of {api.name} overrides these variables of containers: {shown}")


def _write(
    arguments: argparse.Namespace,
    session: Session,
    diagnosis: Diagnosis,
    plan: ImagePlan,
    options: ImageOptions,
    wheel: Path | None,
    file: Path,
) -> None:
    console = session.console
    folder = Path(arguments.out).expanduser()
    context = BuildContext(folder.absolute(), diagnosis.project, file.resolve())
    context.check()
    locks = [""] * len(plan.environments)
    if not arguments.no_lock:
        console.progress("locking the versions of packages")
        locks = [context.lock(each, number, session.environ) for number, each in enumerate(plan.environments, 1)]
    console.progress("copying files")
    context.write(plan, options, wheel, locks)
    # With a manifest, standard output is for the manifest.
    line = console.note if arguments.kubernetes else console.line
    line(f"wrote {folder}")
    for layer, count, size in context.sizes():
        line(f"  {layer}: {count} file{'s' if count != 1 else ''}, {format_size(size)}")
    if arguments.build:
        console.clear_progress()
        console.flush()
        builder = build_image(folder, options.tag, session.environ)
        line(f"built {options.tag} with {builder}")
    elif not arguments.kubernetes:
        line(f"next: docker build --tag {options.tag} {folder}")
