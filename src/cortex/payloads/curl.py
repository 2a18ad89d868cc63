"""Commands for curl that work when they are pasted."""

from __future__ import annotations

import shlex

FILE = "@FILE.json"  #: a body that the user has to write


def curl(verb: str, url: str, body: str | None = None, options: str = "", key: str = "") -> str:
    """Return the command that sends a request; `body` is JSON, or `@` and the file that has it.

    `options` come before the URL, and the option with an API key after it. Both are quoted already.
    """
    default = "GET" if body is None else "POST"
    shown = "" if verb == default else f" -X {verb}"
    content = "" if body is None else f" -H 'content-type: application/json' -d {shlex.quote(body)}"
    return f"curl{shown}{options} {shlex.quote(url)}{key}{content}"
