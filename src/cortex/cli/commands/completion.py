"""`cortex completion`: completion scripts for shells, generated from the argument parsers of the commands."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Any

from cortex.cli.session import Session


@dataclass(frozen=True)
class Command:
    """Completions of one command."""

    name: str
    help: str
    options: tuple[tuple[str, str], ...]  #: option and help
    words: tuple[str, ...]  #: actions of commands such as `env`
    takes_files: bool


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", metavar="SHELL", choices=sorted(_SCRIPTS), help="bash, fish or zsh")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Print the script."""
    session.console.line(_SCRIPTS[arguments.shell](commands()).rstrip("\n"))
    return 0


def commands() -> list[Command]:
    """Return the completions of every command."""
    main: Any = importlib.import_module("cortex.cli.main")  # `main` imports this module
    found = []
    for name, text in main.COMMANDS.items():
        actions = main.command_parser(name)._actions
        options = [(option, action.help or "") for action in actions for option in action.option_strings]
        positional = [action for action in actions if not action.option_strings]
        words = [word for action in positional for word in action.choices or ()]
        takes_files = any(action.metavar in ("FILE", "SAMPLE") for action in actions)
        found.append(Command(name, text, tuple(options), tuple(words), takes_files))
    return found


def _bash(known: list[Command]) -> str:
    cases = []
    for command in known:
        words = " ".join([*command.words, *(option for option, _ in command.options)])
        files = '; COMPREPLY+=($(compgen -f -- "$word"))' if command.takes_files else ""
        cases.append(f'    {command.name}) COMPREPLY=($(compgen -W "{words}" -- "$word")){files} ;;')
    return f"""_cortex() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(command.name for command in known)}" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{chr(10).join(cases)}
  esac
}}
complete -o filenames -F _cortex cortex
"""


def _zsh(known: list[Command]) -> str:
    names = "\n".join(f"    '{command.name}:{_quoted(command.help)}'" for command in known)
    cases = []
    for command in known:
        words = " ".join([*command.words, *(option for option, _ in command.options)])
        files = "; _files" if command.takes_files else ""
        cases.append(f"    {command.name}) compadd -- {words}{files} ;;")
    return f"""#compdef cortex
_cortex() {{
  local -a names
  names=(
{names}
  )
  if (( CURRENT == 2 )); then
    _describe command names
    return
  fi
  case "$words[2]" in
{chr(10).join(cases)}
  esac
}}
if [ "$funcstack[1]" = "_cortex" ]; then
  _cortex "$@"
else
  compdef _cortex cortex
fi
"""


def _fish(known: list[Command]) -> str:
    lines = ["complete -c cortex -f"]
    for command in known:
        here = f"'__fish_seen_subcommand_from {command.name}'"
        lines.append(f"complete -c cortex -n __fish_use_subcommand -a {command.name} -d '{_quoted(command.help)}'")
        if command.words:
            lines.append(f"complete -c cortex -n {here} -a '{' '.join(command.words)}'")
        if command.takes_files:
            lines.append(f"complete -c cortex -n {here} -F")
        for option, text in command.options:
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"complete -c cortex -n {here} {flag} -d '{_quoted(text)}'")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("'", "").replace(":", "")


_SCRIPTS = {"bash": _bash, "fish": _fish, "zsh": _zsh}
