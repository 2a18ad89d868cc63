"""Pages of an API's configuration and history, with the buttons that replace what runs."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cortex.config.api_spec import api_spec
from cortex.errors import InputError
from cortex.masking import mask_spec
from cortex.operator.access.audit import record_change
from cortex.operator.dashboard.pages.apis import api_row
from cortex.operator.dashboard.rendering import Pages, done
from cortex.operator.dashboard.security import PREFIX, form_of, session_of
from cortex.operator.deploy.deployer import DeployResult
from cortex.operator.deploy.projects import dotenv_of
from cortex.operator.http.api_routes import describe_history, promote_revision
from cortex.operator.http.services import Services
from cortex.payloads.json_object import Json
from cortex.state.revision import Revision


def revision_pages(services: Services, pages: Pages) -> APIRouter:
    """Return the pages."""
    router = APIRouter(prefix="/apis/{api}")

    @router.get("/configuration")
    async def show_configuration(request: Request, api: str) -> Response:
        """Show the configuration of the newest revision, and of the serving one if it is another."""
        row, record = await api_row(services, api), services.api(api)
        serving = record.serving if record.serving and record.serving.hash != record.revision else None

        def shown(revision: Revision) -> Json:
            dotenv = dotenv_of(services.home.projects_dir / revision.project_hash)
            return mask_spec(api_spec(revision.spec), dotenv)

        return pages.page(
            request,
            "api_configuration.html",
            row=row,
            tab="configuration",
            record=record,
            newest=shown(record.target),
            serving=shown(serving) if serving else None,
        )

    @router.get("/history")
    async def show_history(request: Request, api: str) -> Response:
        """Show the revisions, the newest first."""
        row, record = await api_row(services, api), services.api(api)
        trial = services.replicas.trials.describe(record)
        entries = describe_history(services.apis.history(api), record, trial)
        return pages.page(request, "api_history.html", row=row, tab="history", entries=entries)

    @router.post("/rollback")
    async def roll_back(request: Request, api: str) -> Response:
        """Deploy the revision again that the form names."""
        number = form_of(request).get("revision", "")
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise InputError(f"{number[:20]!r} is not the number of a revision")
        session = session_of(request)
        result = await services.deploys.deployer.rollback(
            api, int(number), by=session.caller, principal=session.principal
        )
        return _finish(request, api, result)

    @router.post("/promote")
    async def promote(request: Request, api: str) -> Response:
        """End the trial of the newest revision, so that it replaces the old one."""
        return _finish(request, api, promote_revision(services, api, session_of(request).caller))

    @router.post("/refresh")
    async def refresh(request: Request, api: str) -> Response:
        """Replace every replica."""
        return _finish(request, api, await services.deploys.deployer.refresh(api, False))

    return router


def _finish(request: Request, api: str, result: DeployResult) -> Response:
    record_change(request, result.error or result.message, api, is_done=not result.error)
    if result.error:
        raise InputError(result.error)
    return done(request, f"{PREFIX}/apis/{api}", result.message)
