"""`cortex schema`: print the JSON Schema of `cortex.yaml` for editors."""

from __future__ import annotations

import argparse
import re

from cortex.cli.session import Session

#: The last version of each file generation, as in `config/json_schema.py`, which takes longer to import.
GENERATIONS = ("0.9", "0.11", "0.12", "0.18", "0.33", "0.35")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--generation",
        metavar="VERSION",
        type=_generation,
        choices=GENERATIONS,
        default=GENERATIONS[-1],
        help="version of the files: any from 0.8 to 0.35; default: 0.35, the current form",
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Print the schema."""
    from cortex.config.json_schema import json_schema  # noqa: PLC0415 - completion loads all command modules

    session.console.json(json_schema(arguments.generation))
    return 0


def _generation(text: str) -> str:
    """Return the generation of the files of a version."""
    found = re.fullmatch(r"0\.([0-9]{1,2})(\.[0-9]+)?", text)
    version = int(found[1]) if found else 0
    generation = next((name for name in GENERATIONS if version <= int(name.partition(".")[2])), None)
    if version < 8 or generation is None:
        raise argparse.ArgumentTypeError(f"must be a version from 0.8 to 0.35 (got {text})")
    return generation
