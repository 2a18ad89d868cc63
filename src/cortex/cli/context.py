"""What a command gets beside its arguments: the installation's home, the process's environment, the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cortex.cli.output import Console
from cortex.home import Home


@dataclass(frozen=True)
class Context:
    """The world of one call of the command line."""

    home: Home
    environ: Mapping[str, str]
    console: Console
