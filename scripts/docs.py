"""Write the CLI reference and the JSON Schema from the code, and check every link of the documentation.

`--check` writes nothing and fails where a file would change. Knows the commands only by their parsers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cortex.cli.main import COMMANDS, command_parser
from cortex.config.descriptions import DESCRIPTIONS
from cortex.config.json_schema import json_schema

ROOT = Path(__file__).resolve().parent.parent
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
FIELDS_PAGE = ROOT / "docs" / "reference" / "configuration.md"
SCHEMA = ROOT / "docs" / "reference" / "cortex.schema.json"
#: Options of many commands, which the page explains once.
COMMON = {"-e": "environment to use; default: the default environment", "-o": "output format: pretty or json"}
MARKER = "<!-- Below this line: written by `make docs` from the commands themselves. -->\n"

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def main() -> int:
    check = "--check" in sys.argv[1:]
    problems = [problem for page in pages() for problem in broken_links(page)]
    for file, wanted in generated().items():
        is_current = file.exists() and file.read_text() == wanted
        if not is_current and check:
            problems.append(f"{file.relative_to(ROOT)}: the code has changed; run `make docs`")
        elif not is_current:
            file.write_text(wanted)
            print(f"wrote {file.relative_to(ROOT)}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(list(pages()))} pages, {len(problems)} problems")
    return 1 if problems else 0


def generated() -> dict[Path, str]:
    """Return the content of every generated file."""
    schema = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    fields = with_meanings(FIELDS_PAGE.read_text())
    return {CLI_PAGE: with_commands(CLI_PAGE.read_text()), FIELDS_PAGE: fields, SCHEMA: schema}


def with_meanings(page: str) -> str:
    """Return the reference of `cortex.yaml` with the meaning of each field, the second column of the tables."""
    section, lines = "", []
    for line in page.splitlines():
        if heading := re.fullmatch(r"#{2,3} ([a-z_.]+)", line):
            section = heading[1]
        row = re.match(r"\| `([a-z_]+)` \| ", line)
        path = ".".join(filter(None, (section, row[1]))) if row else ""
        if row and path in DESCRIPTIONS:
            line = f"{row[0]}{DESCRIPTIONS[path]} |{line.removeprefix(row[0]).partition(' |')[2]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def pages() -> Iterator[Path]:
    """Yield every Markdown page of the project, sorted."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in ("docs", "examples", "benchmarks"):
        hidden = (page for page in (ROOT / folder).rglob("*.md") if "/." not in page.relative_to(ROOT).as_posix())
        yield from sorted(hidden)


def broken_links(page: Path) -> Iterator[str]:
    """Yield a line for each link to a file, folder or heading that is not there; web links are not followed."""
    text = _INLINE_CODE.sub("", _FENCE.sub("", page.read_text()))
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.relative_to(ROOT)}: {target}: no such file"
        elif anchor and anchor not in anchors(file):
            yield f"{page.relative_to(ROOT)}: {target}: no such heading"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, formed as GitHub forms them."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def with_commands(page: str) -> str:
    """Return the CLI page with the part below the marker written anew."""
    return page.partition(MARKER)[0] + MARKER + "\n" + cli_reference()


def cli_reference() -> str:
    """Describe every command in Markdown."""
    lines = [line for name in COMMANDS for line in described(command_parser(name))]
    return "\n".join(lines)


def described(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the section of a command, then those of the commands under it."""
    actions = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    nested = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    if nested:
        for subparser in nested[0].choices.values():
            yield from described(subparser)
        return
    yield f"## {parser.prog}\n"
    if parser.description:
        yield f"{parser.description}\n"
    yield from parameters(parser.prog, actions)


def parameters(name: str, actions: list[argparse.Action]) -> Iterator[str]:
    """Yield how a command is called, and the table of what it takes."""
    arguments = [action for action in actions if not action.option_strings]
    options = [action for action in actions if action.option_strings]
    common = [action for action in options if COMMON.get(action.option_strings[0]) == help_of(action)]
    own = [action for action in options if action not in common]
    usual = [f"[{action.option_strings[0]} {value_name(action)}]" for action in common]
    words = [name, *map(placeholder, arguments), *(["[OPTIONS]"] if own else []), *usual]
    yield f"```sh\n{' '.join(words)}\n```\n"
    if arguments or own:
        yield "| | | default |\n|---|---|---|"
        for action in arguments + own:
            yield f"| {spelled(action)} | {cell(help_of(action))} | {default(action)} |"
        yield ""


def placeholder(action: argparse.Action) -> str:
    return f"[{value_name(action)}]" if action.nargs in ("?", "*") else value_name(action)


def value_name(action: argparse.Action) -> str:
    return str(action.metavar or (action.choices and "|".join(map(str, action.choices))) or action.dest.upper())


def spelled(action: argparse.Action) -> str:
    """Write how an argument or option is given; cells of a table can't hold a bare bar."""
    value = "" if action.nargs == 0 else cell(value_name(action))
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{option} {value}`" if value else f"`{option}`" for option in action.option_strings)


def help_of(action: argparse.Action) -> str:
    """Return the help of an argument; its default has a column of its own."""
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return text.removesuffix(f"; default: {action.default}").removesuffix(f" (default: {action.default})")


def default(action: argparse.Action) -> str:
    if action.required and action.nargs not in ("?", "*"):
        return "required"
    return "" if action.default in (None, False, "", [], argparse.SUPPRESS) else f"`{action.default}`"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
