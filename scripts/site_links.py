"""Hooks of `mkdocs.yml`.

The navigation is that of `docs/README.md`. Links to files outside `docs/` lead to the repository. The page of the
Python client ends with the client's docstrings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"- \[(?P<title>[^]]+)\]\((?P<page>[^)]+)\)")
#: The page that the docstrings of a class are added to.
_CLIENT_PAGE, _CLIENT = "reference/python-client.md", "cortex.client.client.Client"
_LINK = re.compile(r"\]\((?P<path>\.\.?/[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Set the navigation: a tab for each heading of `docs/README.md`, a group for each line that ends with a colon."""
    config.nav = navigation(Path(config.docs_dir, "README.md").read_text())
    return config


def navigation(index: str) -> list[Any]:
    """Return the navigation of an index page."""
    tabs: list[Any] = [{"Home": "README.md"}]
    entries: list[Any] = []
    for line in index.splitlines():
        if line.startswith("## "):
            entries = tab = []
            tabs.append({line.removeprefix("## "): tab})
        elif line.endswith(":"):
            entries = []
            tab.append({line.removesuffix(":"): entries})
        elif found := _ENTRY.match(line):
            entries.append({found["title"]: found["page"]})
    return tabs


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace the links of a page that leave `docs/`, and add the docstrings."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found["path"]))
        if path.startswith("docs/"):
            return found[0]
        return f"]({config.repo_url}/blob/main/{path}{found['anchor'] or ''})"

    docstrings = f"\n\n## All methods\n\n::: {_CLIENT}\n" if page.file.src_uri == _CLIENT_PAGE else ""
    return _LINK.sub(replaced, markdown) + docstrings
