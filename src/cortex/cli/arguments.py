"""What commands take: one kind of parser, whose errors name the nearest right word, and the options many share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from cortex.errors import InputError


class UsageError(InputError):
    """The command was called in a wrong way."""

    code = "usage"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of ending the process. Raises: UsageError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong, with how to call the command."""
        raise UsageError(f"{message}\n{self.format_usage().strip()}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; for an unknown option, name the one that was probably meant."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            guess = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            hint = f"; did you mean {guess}?" if unknown[0].startswith("-") and guess else ""
            self.error(f"{unknown[0]}: no such {'option' if unknown[0].startswith('-') else 'argument'}{hint}")
        return parsed


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` that `word` is probably a misspelling of."""
    import difflib  # noqa: PLC0415 - only for mistakes, and slower to import than most commands' own code

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)), None)


def add_env(parser: argparse.ArgumentParser) -> None:
    """Take the environment to talk to."""
    parser.add_argument("-e", "--env", metavar="ENV", help="environment to use instead of the default one")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Take the form of the output."""
    parser.add_argument(
        "-o", "--output", choices=("pretty", "json"), default="pretty", help="form of the output: pretty or json"
    )


def add_api(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Take the name of an API."""
    parser.add_argument("api", metavar="API", nargs="?" if optional else None, help="name of an API")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Take the id of a job, if one is meant."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="id of one of its jobs")
