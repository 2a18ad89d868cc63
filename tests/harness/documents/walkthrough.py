"""Run a page of the documentation as its reader does: write its files, run its commands in one shell, compare outputs.

- A block after a line that ends with a path, such as `` `hello/handler.py`: ``, is the content of that file.
- A block of the language `sh` is run. Its last command must succeed, unless an output is given.
- A block of `json` or `text` after it is its output: JSON that is equal to the end of the output, or lines that occur
  in this order. `…` stands for any text.
- `<!-- not run: reason -->` before a block leaves it out.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"(?P<before>[^\n]*)\n+```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`(?P<path>[\w./-]+)`:$")
_SEPARATOR = "\x1e"


@dataclass
class Command:
    """A block of commands and what it must print."""

    code: str
    expected: str = ""
    is_json: bool = False


def walkthrough(page: Path) -> list[Command | tuple[str, str]]:
    """Return the steps of a page in order: commands, and files as path and content."""
    steps: list[Command | tuple[str, str]] = []
    for found in _BLOCK.finditer(page.read_text()):
        before, language, code = found["before"], found["language"], found["code"]
        last = steps[-1] if steps else None
        if before.startswith("<!-- not run"):
            continue
        if file := _FILE.search(before):
            steps.append((file["path"], code))
        elif language == "sh":
            steps.append(Command(code))
        elif language in ("json", "text") and isinstance(last, Command) and not last.expected:
            last.expected, last.is_json = code, language == "json"
    return steps


def run(page: Path, folder: Path, environ: Mapping[str, str], ports: Mapping[str, str], timeout_s: float) -> None:
    """Run a page in a folder. `ports` are those of the documentation and those to use instead."""
    steps = walkthrough(page)
    script = ""
    for number, step in enumerate(steps):
        if isinstance(step, Command):
            script += f"{step.code}\nprintf '{_SEPARATOR}%s{_SEPARATOR}' $?\n"
        else:
            path, content = step
            end = f"END-OF-FILE-{number}"
            script += f"mkdir -p \"$(dirname '{path}')\"\ncat > '{path}' <<'{end}'\n{content}{end}\n"
    for documented, used in ports.items():
        script = script.replace(f"localhost:{documented}", f"localhost:{used}")
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    commands = [step for step in steps if isinstance(step, Command)]
    parts = done.stdout.split(_SEPARATOR)
    assert len(parts) == 2 * len(commands) + 1, done.stdout
    for command, output, status in zip(commands, parts[::2], parts[1::2], strict=False):
        said = f"\n{command.code}\nprinted, with the exit code {status}:\n{output}"
        if not command.expected:
            assert status == "0", said
        elif command.is_json:
            assert _fits(_last_json(output), json.loads(command.expected)), said
        else:
            assert _occur(command.expected, output), said


def _last_json(output: str) -> Any:
    """Return the JSON document with which an output ends; None without one."""
    lines = output.strip().splitlines()
    for first in range(len(lines)):
        try:
            return json.loads("\n".join(lines[first:]))
        except ValueError:
            continue
    return None


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, str):
        return isinstance(value, str) and _pattern(expected).fullmatch(value) is not None
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_fits(value[k], expected[k]) for k in value)
        )
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_fits, value, expected))
    return bool(value == expected)


def _occur(expected: str, output: str) -> bool:
    """Return whether the expected lines occur in this order."""
    lines = iter(line.rstrip() for line in output.splitlines())
    return all(any(_pattern(line).fullmatch(found) for found in lines) for line in expected.splitlines() if line)


def _pattern(expected: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, expected.rstrip().split("…"))), re.DOTALL)
