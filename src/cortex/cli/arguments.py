"""Argument parser of the commands, with the arguments and input files that several of them share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from cortex.errors import InputError, UsageError
from cortex.spelling import nearest

_CONTENT_TYPES = {
    ".json": "application/json",
    ".txt": "text/plain",
    ".csv": "text/csv",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
}
_DEFAULT_CONTENT_TYPE = "application/octet-stream"
#: Options of other tools, by the names of those that mean the same here.
_OTHER_OPTIONS = {"n": "tail", "lines": "tail", "port": "gateway-port", "p": "gateway-port"}
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_DURATION_S = 100 * 365 * 86400


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UsageError instead of exiting, and suggests corrections of misspelled options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with the usage of the command, and the actions if one is missing."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message.endswith(f"required: {action.metavar}"):
                message = f"{message} ({', '.join(action.choices)})"
        raise UsageError(f"{message}\n{self.format_usage().strip()}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments. Raises: UsageError, with the most similar option for an unknown one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown and not unknown[0].startswith("-"):
            self.error(f"{unknown[0]}: no such argument")
        if unknown:
            guess = self._similar_option(unknown[0].partition("=")[0])
            self.error(f"{unknown[0]}: no such option{f'; did you mean {guess}?' if guess else ''}")
        return parsed

    def _similar_option(self, written: str) -> str | None:
        """Return the option whose name, or one of whose values, is similar; dashes do not count."""
        options = {option.lstrip("-"): option for option in self._option_string_actions if option.startswith("--")}
        if meant := options.get(_OTHER_OPTIONS.get(written.lstrip("-"), "")):
            return meant
        for option, action in self._option_string_actions.items():
            if option.startswith("--"):
                options |= {str(value): f"{option} {value}" for value in action.choices or ()}
        return options.get(nearest(written.lstrip("-"), options) or "")


def add_env(parser: argparse.ArgumentParser) -> None:
    """Add `--env`."""
    parser.add_argument("-e", "--env", metavar="ENV", help="environment to use; default: the default environment")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add `--output`."""
    parser.add_argument(
        "-o", "--output", choices=("pretty", "json"), default="pretty", help="output format: pretty or json"
    )


def add_api(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add the name of an API."""
    parser.add_argument("api", metavar="API", nargs="?" if optional else None, help="name of the API")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the id of a job, which is optional."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="id of a job of the API")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the path of a configuration file."""
    from cortex.client.packaging import DEFAULT_CONFIG  # noqa: PLC0415 - not needed by most commands

    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=DEFAULT_CONFIG, help="configuration file or its folder"
    )


def seconds_of(option: str, text: str) -> float:
    """Return the seconds of a duration such as `30d`, `12h`, `90m` or `45s`. Raises: InputError."""
    unit, number = _UNITS_S.get(text[-1:]), text[:-1]
    if unit is None or not number.isdecimal() or not 0 < int(number) * unit <= _MAX_DURATION_S:
        raise InputError(f"{option} {text}: must be a duration of up to 100 years, such as 30d, 12h, 90m or 45s")
    return int(number) * unit


def unreadable(path: str, error: OSError) -> InputError:
    """Return the error for an input file; JSON in place of its name is a typical mistake."""
    hint = "; to send this JSON, pipe it to the command and write `-`" if path.lstrip().startswith(("{", "[")) else ""
    return InputError(f"{path}: can't be read: {(error.strerror or str(error)).lower()}{hint}")


def read_sample(path: str) -> tuple[bytes, str]:
    """Return the content of a sample file and its content type; `-` is JSON from standard input. Raises: InputError."""
    if path == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed")
        return sys.stdin.buffer.read(), _CONTENT_TYPES[".json"]
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    return content, _CONTENT_TYPES.get(Path(path).suffix.lower(), _DEFAULT_CONTENT_TYPE)
