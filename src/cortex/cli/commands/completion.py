"""`cortex completion`: completion scripts for shells.

A script calls `cortex completion SHELL --words …` at each press of Tab, with the words up to the cursor. So completion
knows the arguments of this version, and the APIs, jobs, keys and tokens of the operator.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cortex.cli.session import Session
from cortex.errors import CortexError, UsageError
from cortex.terminal import printable

if TYPE_CHECKING:
    from cortex.client.client import Client

#: Line that asks the shell to complete the name of a file.
_FILES = ":files"
#: Precedes the words of the command line, in calls of the scripts.
_WORDS = "--words"
_FILE_ARGUMENTS = frozenset({"FILE", "SAMPLE", "JOB.json"})
#: Limit of the wait for the operator.
_LOOKUP_S = 1.0

#: Word and description.
Candidate = tuple[str, str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", metavar="SHELL", choices=sorted(_SCRIPTS), help="bash, fish or zsh")
    # A positional argument, because the remainder of an option would end at the word `--`.
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Print the script, or the candidates for the last one of the given words."""
    if not arguments.words:
        session.console.line(_SCRIPTS[arguments.shell].rstrip("\n"))
        return 0
    if arguments.words[0] != _WORDS:
        raise UsageError(f"{arguments.words[0]}: no such argument; `cortex completion SHELL` has no others")
    for word, text in candidates(arguments.words[1:] or [""], session):
        word = printable(word)  # the shell shows it: another operator or a caller may have written it
        session.console.line(f"{word}\t{printable(' '.join(text.split()))}" if text else word)
    return 0


def candidates(words: Sequence[str], session: Session) -> list[Candidate]:
    """Return the words that may replace the last one of `words`, which follow the name of the program."""
    main: Any = importlib.import_module("cortex.cli.main")  # `main` imports this module
    current = words[-1]
    if len(words) == 1:
        return [found for found in main.COMMANDS.items() if found[0].startswith(current)]
    if words[0] not in main.COMMANDS:
        return []
    line = _Line(words[0], main.command_parser(words[0]))
    for word in words[1:-1]:
        line.read(word)
    return [found for found in line.candidates(current, session) if found[0] == _FILES or found[0].startswith(current)]


@dataclass
class _Line:
    """The words before the cursor, read as the parser of their command reads them."""

    command: str
    parser: argparse.ArgumentParser
    option: argparse.Action | None = None  #: an option whose value comes next
    positionals: int = 0  #: number of positional arguments read by `parser`
    values: dict[str, str] = field(default_factory=dict)  #: by the name of the argument

    def read(self, word: str) -> None:
        """Read a complete word."""
        if self.option is not None:
            self.values[self.option.dest], self.option = word, None
        elif word.startswith("-"):
            name, has_value, value = word.partition("=")
            action = self.parser._option_string_actions.get(name)
            if action is not None and has_value:
                self.values[action.dest] = value
            elif action is not None and action.nargs != 0:
                self.option = action
        elif (action := self._next_positional()) is not None:
            self.values[action.dest] = word
            self.positionals += 1
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                self.parser, self.positionals = action.choices[word], 0

    def candidates(self, current: str, session: Session) -> Iterator[Candidate]:
        """Yield what may follow; `current` is the beginning of it."""
        action = self.option or self._next_positional()
        if self.option is None and (current.startswith("-") or action is None):
            yield from self._options()
        elif action is not None:
            yield from self._values(action, session)

    def _next_positional(self) -> argparse.Action | None:
        actions = self.parser._actions
        found = [action for action in actions if not action.option_strings and action.help != argparse.SUPPRESS]
        if self.positionals < len(found):
            return found[self.positionals]
        return found[-1] if found and found[-1].nargs in ("*", "+") else None

    def _options(self) -> Iterator[Candidate]:
        for action in self.parser._actions:
            if action.help != argparse.SUPPRESS:
                yield from ((option, action.help or "") for option in action.option_strings)

    def _values(self, action: argparse.Action, session: Session) -> Iterable[Candidate]:
        if isinstance(action, argparse._SubParsersAction):
            return [(choice.dest, choice.help or "") for choice in action._get_subactions()]
        if action.choices is not None:
            return [(str(choice), "") for choice in action.choices]
        metavar = str(action.metavar)
        if "|" in metavar:
            return [(value, "") for value in metavar.split("|")]
        if metavar in _FILE_ARGUMENTS:
            return [(_FILES, "")]
        is_environment = metavar == "ENV" or (self.command == "env" and metavar in ("NAME", "OLD"))
        if is_environment:
            return [(known.name, known.operator_endpoint) for known in session.environments.known()]
        lookup = _LOOKUPS.get((self.command, metavar)) or _LOOKUPS.get(("", metavar))
        return _looked_up(lambda: lookup(session.client(self.values.get("env")), self.values)) if lookup else []


def _looked_up(lookup: Callable[[], list[Candidate]]) -> list[Candidate]:
    """Return what the operator knows; nothing if it does not answer soon."""
    found: list[Candidate] = []

    def run() -> None:
        with contextlib.suppress(
            CortexError, KeyError, TypeError, AttributeError
        ):  # there is no operator, or one of another version
            found.extend(lookup())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LOOKUP_S)
    return list(found)


def _apis(client: Client, values: Mapping[str, str]) -> list[Candidate]:
    return [(api["spec"]["name"], f"{api['spec']['kind']}, {api['status']['message']}") for api in client.list_apis()]


def _jobs(client: Client, values: Mapping[str, str]) -> list[Candidate]:
    jobs = [job["job_status"] for job in client.list_jobs(values["api"])]
    return [(job["job_id"], job["status_message"]) for job in jobs]


def _revisions(client: Client, values: Mapping[str, str]) -> list[Candidate]:
    history = client.history(values["api"])
    return [(str(entry["number"]), f"{entry['action']} of {entry['deployed_at']}") for entry in history]


def _keys(client: Client, values: Mapping[str, str]) -> list[Candidate]:
    return [(key["id"], key["name"]) for key in client.list_keys()]


def _tokens(client: Client, values: Mapping[str, str]) -> list[Candidate]:
    return [(token["name"], token["scope"]) for token in client.list_tokens()]


#: By command ("" is any) and the name of an argument in the help.
_LOOKUPS: Mapping[tuple[str, str], Callable[[Client, Mapping[str, str]], list[Candidate]]] = {
    ("", "API"): _apis,
    ("", "JOB"): _jobs,
    ("rollback", "REVISION"): _revisions,
    ("keys", "ID"): _keys,
    ("tokens", "TOKEN"): _tokens,
}

_BASH = f"""\
_cortex() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" line
  local -a files
  COMPREPLY=()
  while IFS= read -r line; do
    if [ "$line" = "{_FILES}" ]; then
      mapfile -t files < <(compgen -f -- "$word")
      COMPREPLY+=("${{files[@]}}")
    else
      COMPREPLY+=("${{line%%$'\\t'*}}")
    fi
  done < <("${{COMP_WORDS[0]}}" completion bash {_WORDS} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null)
}}
complete -o filenames -F _cortex cortex
"""
_ZSH = f"""\
#compdef cortex
_cortex() {{
  local -a described
  local line tab=$'\\t'
  for line in "${{(@f)$("$words[1]" completion zsh {_WORDS} "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}"; do
    if [[ "$line" == "{_FILES}" ]]; then
      _files
    elif [[ "$line" == *"$tab"* ]]; then
      described+=("${{${{line%%$tab*}}//:/\\\\:}}:${{line#*$tab}}")
    elif [[ -n "$line" ]]; then
      described+=("${{line//:/\\\\:}}")
    fi
  done
  (( ${{#described}} )) && _describe 'cortex' described
}}
if [ "$funcstack[1]" = "_cortex" ]; then
  _cortex "$@"
else
  compdef _cortex cortex
fi
"""
_FISH = f"""\
function __cortex_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in ($words[1] completion fish {_WORDS} $words[2..-1] "$current" 2>/dev/null)
        if test "$line" = "{_FILES}"
            __fish_complete_path "$current"
        else
            printf '%s\\n' $line
        end
    end
end
complete -c cortex -f -a '(__cortex_complete)'
"""
_SCRIPTS = {"bash": _BASH, "fish": _FISH, "zsh": _ZSH}
