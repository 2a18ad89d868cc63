"""The `/docs` page."""

from __future__ import annotations

from cortex.operator.http.app import docs_page

OPERATION = {"description": "Delete <it>.", "parameters": [{"name": "api", "in": "path"}]}
DESCRIPTION = {"info": {"title": "operator", "version": "1"}, "paths": {"/v1/apis/{api}": {"delete": OPERATION}}}


def test_lists_each_route_without_external_resources() -> None:
    page = docs_page(DESCRIPTION)
    assert "<code>DELETE /v1/apis/{api}</code>" in page
    assert "Delete &lt;it&gt;." in page
    assert "<script" not in page
    assert "http" not in page
