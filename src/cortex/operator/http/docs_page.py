"""The `/docs` page: the OpenAPI description as plain HTML, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#f2f2f2;padding:.1em .3em}td,th{text-align:left;vertical-align:top;padding:.3em 1em .3em 0}"
)


def docs_page(description: dict[str, Any]) -> str:
    """Return the page for an OpenAPI description, with all texts escaped."""
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    rows = "".join(_rows(description["paths"]))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>Every route except <code>/livez</code> requires the header "
        "<code>Authorization: Bearer TOKEN</code>; the token is in the file <code>token</code> of CORTEX_HOME. "
        "The same description as JSON: <code>/openapi.json</code>.</p>"
        f"<table><tr><th>route<th>parameters<th>description</tr>{rows}</table></html>"
    )


def _rows(paths: dict[str, dict[str, Any]]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            parameters = ", ".join(
                f"<code>{escape(parameter['name'])}</code> ({escape(parameter['in'])})"
                for parameter in operation.get("parameters", [])
            )
            text = escape(operation.get("description", ""))
            yield f"<tr><td><code>{escape(method.upper())} {escape(path)}</code><td>{parameters}<td>{text}</tr>"
