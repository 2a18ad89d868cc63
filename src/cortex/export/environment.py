"""Build an environment of a project during the build of its image: `python -m cortex.export.environment FOLDER`.

It becomes part of the installation (`engine/environment.py`), so that replicas start without installing anything.
The folder has what `context.py` writes:

    environment.json    fields of `ImageEnvironment`
    constraints.txt     locked versions; may be missing
    files/              the dependency files, at their paths in the project
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cortex.config.schema import Dependencies
from cortex.engine.environment import INSTALLED, prepare_environment
from cortex.errors import CortexError
from cortex.home import Home

ENVIRONMENT = "environment.json"
CONSTRAINTS = "constraints.txt"
FILES = "files"


def build_environment(folder: Path, environ: Mapping[str, str], installed: Home = INSTALLED) -> Path:
    """Build the environment that `folder` describes, and return its own folder. Raises: EnvironmentBuildError."""
    described: dict[str, Any] = json.loads((folder / ENVIRONMENT).read_text())
    variables: dict[str, str] = described.pop("variables")
    constraints = folder / CONSTRAINTS
    pins = constraints.read_text().splitlines() if constraints.is_file() else []
    installed.environments_dir.mkdir(exist_ok=True)
    built = asyncio.run(
        prepare_environment(
            installed,
            folder / FILES,
            Dependencies(**described),
            environ,
            variables,
            lambda line: print(line, flush=True),
            installed,
            pins,
        )
    )
    result = installed.environments_dir / built.key
    result.chmod(0o755)  # it is not the owner who runs the image
    return result


def main() -> int:
    """Run the build, and return the exit code."""
    try:
        build_environment(Path(sys.argv[1]), os.environ)
    except CortexError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
