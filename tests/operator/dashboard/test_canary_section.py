"""The trial of a canary on the page of its API, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response
from markupsafe import Markup

from cortex.lifecycle import TokenScope
from cortex.operator.canary.judge import Finding, PropertyFinding
from cortex.operator.dashboard.pages.apis import RANGES, ApiRow
from cortex.operator.dashboard.rendering import Pages
from cortex.operator.dashboard.samples import ApiSample
from harness.servers.dashboard import assert_readable, served_dashboard

pytestmark = pytest.mark.processes

HOSTILE = "<script>alert(1)</script>"
FINDINGS = [
    PropertyFinding("errors", Finding.UNKNOWN, 0.01, 0.0125, 0.005, 1414.2),
    PropertyFinding("p50", Finding.NOT_WORSE, 0.5, 0.4, 0.0, 0.0),
    PropertyFinding(f"predictions of {HOSTILE}", Finding.WORSE, None, 0.3, 0.0, float("inf")),
]


def description(**changes: Any) -> dict[str, Any]:
    return {
        "revision_number": 2,
        "old_revision_number": 1,
        "outcome": "trying",
        "reason": "",
        "percent": 10,
        "step": 1,
        "steps": [10, 50],
        "step_requests": 169,
        "findings": [finding.to_json() for finding in FINDINGS],
        **changes,
    }


def page_of_api(folder: Path, canary: dict[str, Any] | None, scope: str = "deploy") -> str:
    """Return the page of an API with a trial."""
    status = {"status_code": "live", "message": "live", "failure": None, "replica_counts": {"requested": 1}}
    scaling: Mapping[str, int] = {"min_replicas": 1, "max_replicas": 1}
    api = {
        "spec": {"name": "iris", "kind": "RealtimeAPI", "autoscaling": scaling},
        "status": status,
        "scaling_shortage": "",
        "canary": canary,
        "models": None,
        "revision": "r2",
        "revision_number": 2,
        "endpoint": "http://localhost:8888/iris",
        "docs": "http://127.0.0.1:8888/iris/docs",
    }
    row = ApiRow(api, ApiSample(), 0.0, Markup())

    def routers(pages: Pages) -> list[APIRouter]:
        router = APIRouter()

        @router.get("/apis/{api}")
        async def show(request: Request) -> Response:
            shown = {"charts": [], "range": "15m", "ranges": RANGES, "replicas": [], "targets": [], "decisions": []}
            return pages.page(request, "api.html", row=row, api=api, tab="overview", **shown)

        return [router]

    with served_dashboard(folder, lambda parts: routers(parts.pages)) as dashboard:
        page = dashboard.sign_in_with(TokenScope(scope), "someone").get("/apis/iris")
        assert page.status_code == 200
        assert_readable(page)
        return page.text


def test_the_evidence_of_a_trial_is_shown(tmp_path: Path) -> None:
    text = page_of_api(tmp_path, description())
    for part in ("revision 2 against 1", "10% of the requests", "169 requests to revision 2", "about 1.42k", "+0.5%"):
        assert part in text
    for part in ("requests with an error", "requests slower than the old p50", "not worse", "not known", "1.25%"):
        assert part in text
    assert text.count('aria-current="step"') == 1


def test_a_shadow_gets_copies_and_no_step_yet(tmp_path: Path) -> None:
    text = page_of_api(tmp_path, description(shadow=True, percent=0, max_latency_increase="25%"))
    for part in ("copies of all requests", "shadow: 169 requests to revision 2", "25% longer"):
        assert part in text
    assert 'aria-current="step"' not in text


def test_names_of_classes_and_reasons_are_escaped(tmp_path: Path) -> None:
    text = page_of_api(tmp_path, description(reason=f"{HOSTILE}\x1b[31m"))
    assert HOSTILE not in text
    assert text.count("predictions of &lt;script&gt;") == 1
    assert "\x1b" not in text


def test_the_versions_of_models_that_differ_are_shown(tmp_path: Path) -> None:
    assert "model: version 9 → 10" in page_of_api(tmp_path, description(models="model: version 9 → 10"))


@pytest.mark.parametrize(
    ("canary", "scope", "buttons"),
    [
        (description(), "deploy", {"Promote 2", "Roll back to 1"}),
        (description(outcome="held", reason="no decision"), "deploy", {"Promote 2", "Roll back to 1"}),
        (description(old_revision_number=None), "deploy", {"Promote 2"}),
        (description(), "read", set()),
        (description(outcome="promoted"), "deploy", set()),
        (description(outcome="rolled back", reason="errors"), "deploy", set()),
        (None, "deploy", set()),
    ],
)
def test_an_open_trial_has_buttons_for_those_who_may_end_it(
    tmp_path: Path, canary: dict[str, Any] | None, scope: str, buttons: set[str]
) -> None:
    text = page_of_api(tmp_path, canary, scope)
    assert {button for button in ("Promote 2", "Roll back to 1") if f">{button}</button>" in text} == buttons
    assert ("Canary:" in text) == (canary is not None)
