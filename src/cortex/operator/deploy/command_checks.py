"""Check that the program of a command can be run on this machine, in the environment that the project will have."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from cortex.config.rules.violations import Violation
from cortex.config.schema import Api
from cortex.config.values import quote
from cortex.projects.project import ProjectFiles

_FIELD = "handler.command"


def program_violation(api: Api, project: ProjectFiles, environ: Mapping[str, str]) -> Violation | None:
    """Return the violation of a program that is not there, or is not executable; None if it may be there.

    Programs of the project itself are checked with its files. What the project installs is not known yet.
    """
    program = (api.handler.command or [""])[0]
    if not program or "$" in program:
        return None
    if program.startswith("/"):
        if not Path(program).is_file():
            return Violation((_FIELD,), f"{quote(program)}: file does not exist on this machine", "correct the path")
        if not os.access(program, os.X_OK):
            fix = f"run `chmod +x {program}`, or write the interpreter first"
            return Violation((_FIELD,), f"{quote(program)}: file is not executable", fix)
        return None
    dependencies = api.handler.dependencies
    installs = any(project.contains(file) for file in (dependencies.pip, dependencies.conda, dependencies.shell))
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    if "/" in program or installs or shutil.which(program, path=path) is not None:
        return None
    fix = "install it on this machine, or list the package that has it in requirements.txt"
    return Violation((_FIELD,), f"{quote(program)} was not found on the PATH", fix)
