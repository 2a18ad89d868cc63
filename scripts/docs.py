"""Write the CLI reference from the commands themselves and check every link of the documentation.

`--check` writes nothing and fails where the page would change. Knows the commands only as Typer describes them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parent.parent
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
MARKER = "<!-- Below this line: written by `make docs` from the commands themselves. -->\n"

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def main() -> int:
    check = "--check" in sys.argv[1:]
    problems = [problem for page in pages() for problem in broken_links(page)]
    page = CLI_PAGE.read_text()
    wanted = with_commands(page)
    if wanted != page and check:
        problems.append(f"{CLI_PAGE.relative_to(ROOT)}: the commands have changed; run `make docs`")
    elif wanted != page:
        CLI_PAGE.write_text(wanted)
        print(f"wrote {CLI_PAGE.relative_to(ROOT)}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(list(pages()))} pages, {len(problems)} problems")
    return 1 if problems else 0


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
    from cortex.cli.main import app  # noqa: PLC0415 - links can be checked without it

    return "\n".join(described("cortex", typer.main.get_command(app)))


def described(name: str, command: Any) -> Iterator[str]:
    """Yield the section of a command, then those of the commands under it."""
    if command.hidden:
        return
    children = getattr(command, "commands", None)
    if children is None:
        yield f"## {name}\n"
        yield f"{reflowed(command.help or '')}\n"
        yield from parameters(name, command.params)
        return
    for child, subcommand in children.items():
        yield from described(f"{name} {child}", subcommand)


def parameters(name: str, params: list[Any]) -> Iterator[str]:
    """Yield how a command is called, and the table of what it takes."""
    shown = [param for param in params if not getattr(param, "hidden", False) and param.name != "help"]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    options = [param for param in shown if param.param_type_name == "option"]
    words = [name, *map(placeholder, arguments), *(["[OPTIONS]"] if options else [])]
    yield f"```sh\n{' '.join(words)}\n```\n"
    if shown:
        yield "| | | default |\n|---|---|---|"
        for param in arguments + options:
            names = [placeholder(param)] if param in arguments else [*param.opts, *param.secondary_opts]
            yield f"| {', '.join(f'`{each}`' for each in names)} | {cell(param.help or '')} | {default(param)} |"
        yield ""


def placeholder(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    return word if argument.required or word.startswith("[") else f"[{word}]"


def default(param: Any) -> str:
    value = getattr(param.default, "value", param.default)
    if param.required:
        return "required"
    if value is None or value is False or value == "" or callable(value) or not param.show_default:
        return ""
    flag = param.secondary_opts and param.opts
    return f"`{param.opts[0]}`" if flag and value is True else f"`{value}`"


def reflowed(text: str) -> str:
    """Keep paragraphs, drop the line breaks inside them and Click's marks."""
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n") if part.strip())


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
