"""Pages of API keys, operator tokens and the audit log.

A new key or token is in the response to the form that created it, and nowhere else: it is not stored, and no other page
shows it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from cortex.errors import InputError
from cortex.lifecycle import TokenScope
from cortex.operator.access.audit import AuditLog
from cortex.operator.access.keys import Keys
from cortex.operator.access.routes import (
    NewToken,
    create_recorded_key,
    create_recorded_token,
    revoke_recorded_key,
    revoke_recorded_token,
)
from cortex.operator.access.scopes import CHANGES
from cortex.operator.access.tokens import Tokens
from cortex.operator.dashboard.rendering import Pages, done
from cortex.operator.dashboard.security import PREFIX, Form, form_of
from cortex.state.queries.apis import ApiStore
from cortex.state.queries.audit import AuditFilter

#: Entries of the audit log on one page.
ENTRIES = 100
_DAY_S = 86_400.0
#: Validity of new tokens by its name in the form, in seconds; None: until revoked.
EXPIRIES = {"1 day": _DAY_S, "30 days": 30 * _DAY_S, "90 days": 90 * _DAY_S, "1 year": 365 * _DAY_S, "never": None}
_DEFAULT_EXPIRY = "90 days"
_MAX_NUMBER = 2**63 - 1


def key_pages(keys: Keys, apis: ApiStore, pages: Pages) -> APIRouter:
    """Return the page of API keys; `apis` are suggested for new ones."""
    router = APIRouter(prefix="/keys")

    def show(request: Request, status: int = 200, **values: Any) -> Response:
        names = [record.name for record in apis.records()]
        values = {"created": None, "problem": "", "form": {}} | values
        return pages.page(request, "keys.html", status, keys=keys.list()[::-1], apis=names, **values)

    @router.get("")
    async def show_keys(request: Request) -> Response:
        """Show all keys, the newest first, without their secrets."""
        return show(request)

    @router.post("")
    async def create_key(request: Request) -> Response:
        """Create a key, and show it."""
        form = form_of(request)
        names = re.split(r"[\s,]+", form.get("apis", "").strip(" ,"))
        try:
            created = await create_recorded_key(request, keys, form.get("name", "").strip(), list(filter(None, names)))
        except InputError as error:
            return show(request, _refused(request, error), problem=str(error), form=form)
        return show(request, created=created)

    @router.post("/{key_id}/revoke")
    async def revoke_key(request: Request, key_id: str) -> Response:
        """Revoke a key."""
        key = await revoke_recorded_key(request, keys, key_id)
        return done(request, f"{PREFIX}/keys", f"revoked the key {key['id']} ({key['name']})")

    return router


def token_pages(tokens: Tokens, apis: ApiStore, pages: Pages) -> APIRouter:
    """Return the page of operator tokens; `apis` are suggested for new ones."""
    router = APIRouter(prefix="/tokens")

    def show(request: Request, status: int = 200, **values: Any) -> Response:
        names = [record.name for record in apis.records()]
        choices = {"scopes": list(TokenScope), "expiries": list(EXPIRIES), "expiry": _DEFAULT_EXPIRY}
        values = {"created": None, "problem": "", "form": {}} | choices | values
        return pages.page(request, "tokens.html", status, tokens=tokens.list()[::-1], apis=names, **values)

    @router.get("")
    async def show_tokens(request: Request) -> Response:
        """Show all tokens except the one of the home, the newest first, without their secrets."""
        return show(request)

    @router.post("")
    async def create_token(request: Request) -> Response:
        """Create a token, and show it."""
        form = form_of(request)
        try:
            created = await create_recorded_token(request, tokens, _new_token(form))
        except InputError as error:
            return show(request, _refused(request, error), problem=str(error), form=form)
        return show(request, created=created)

    @router.post("/{token_id}/revoke")
    async def revoke_token(request: Request, token_id: str) -> Response:
        """Revoke a token, which ends its sessions too."""
        token = await revoke_recorded_token(request, tokens, token_id)
        return done(request, f"{PREFIX}/tokens", f"revoked the token {token['id']} ({token['name']})")

    return router


def audit_pages(log: AuditLog, pages: Pages) -> APIRouter:
    """Return the page of the audit log."""
    router = APIRouter()

    @router.get("/audit")
    async def show_audit(
        request: Request,
        token: str = "",
        api: str = "",
        action: str = "",
        before: Annotated[int | None, Query(ge=1, le=_MAX_NUMBER)] = None,
    ) -> Response:
        """Show the latest changes that match, the newest first; `before` continues at older ones."""
        wanted = {"token": token.strip(), "api": api.strip(), "action": action.strip()}
        for name, value in wanted.items():
            if not value.isprintable():
                raise InputError(f"{name}: must consist of printable characters")
        asked = AuditFilter(
            wanted["api"] or None, token=wanted["token"] or None, action=wanted["action"] or None, before=before
        )
        found = await log.find(asked, ENTRIES + 1)
        entries = found[:ENTRIES]
        older = urlencode({**wanted, "before": entries[-1].number}) if len(found) > ENTRIES else ""
        return pages.page(
            request,
            "audit.html",
            entries=entries,
            older=older,
            newest=urlencode(wanted),
            before=before,
            actions=CHANGES,
            **wanted,
        )

    return router


def _new_token(form: Form) -> NewToken:
    """Return the token that a form describes. Raises: InputError."""
    scope, expiry = form.get("scope", ""), form.get("expiry", "")
    if scope not in set(TokenScope):
        raise InputError(f"{scope[:20]!r} is not one of the scopes {', '.join(TokenScope)}")
    if expiry not in EXPIRIES:
        raise InputError(f"{expiry[:20]!r} is not one of {', '.join(EXPIRIES)}")
    name, api = form.get("name", "").strip(), form.get("api", "").strip()
    return NewToken(scope=TokenScope(scope), name=name or None, api=api or None, expires_in_s=EXPIRIES[expiry])


def _refused(request: Request, error: InputError) -> int:
    """Pass the reason to the audit log; return the status of the response."""
    request.state.error = str(error)
    return error.http_status
