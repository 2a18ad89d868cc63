"""Operator tokens: the admin token of the home, and tokens that limit what their owners can do."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, count

from cortex.errors import ConflictError, ForbiddenError, InputError, NotFoundError, UnauthorizedError
from cortex.lifecycle import TokenScope
from cortex.payloads.json_object import Json
from cortex.state.queries.tokens import StoredToken, TokenStore

#: Name of the token in the home's file `token`.
ADMIN_NAME = "admin"
MAX_TOKENS = 1_000
_ID_BYTES = 5
_SECRET_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_API = re.compile(r"[a-z][-a-z0-9]{0,63}")
#: Scopes of tokens that can be limited to one API.
_LIMITABLE = frozenset({TokenScope.READ, TokenScope.DEPLOY})
_MAX_EXPIRY_S = 100 * 365 * 86_400


@dataclass(frozen=True)
class Principal:
    """The client of a request: the name of its token, and what this permits."""

    name: str
    scope: TokenScope
    api: str | None = None  #: the only API that it may read or change; None: all
    expires_at: datetime | None = None
    token_id: str = ""  #: "" for the token of the home

    def check_apis(self, apis: set[str], what: str) -> None:
        """Check that this client may change some APIs, named in `what`. Raises: ForbiddenError."""
        if self.api is not None and (others := sorted(apis - {self.api})):
            raise ForbiddenError(
                f"the token {self.name!r} is limited to the API {self.api}; {what} would also change "
                f"{', '.join(others)}, so nothing was changed: use a file with only {self.api}, or another token"
            )


class Tokens:
    """The tokens of this operator; a change is in force once its method returns."""

    def __init__(
        self, store: TokenStore, admin_token: str, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._store = store
        self._admin = admin_token.encode()
        self._clock = clock
        self._tokens = {token.id: token for token in store.all()}

    def identify(self, authorization: str) -> Principal:
        """Return the client that sent the header `Authorization`; its token may have expired.

        Raises: UnauthorizedError if the token is missing or wrong.
        """
        scheme, _, value = authorization.partition(" ")
        given = value.strip().encode() if scheme.lower() == "bearer" else b""
        if hmac.compare_digest(given, self._admin):
            return Principal(ADMIN_NAME, TokenScope.ADMIN)
        # The id is no secret, so that only the comparison of the hashes must take constant time.
        prefix, _, rest = given.decode(errors="replace").partition("_")
        token = self._tokens.get(rest.partition("_")[0]) if prefix == "ct" else None
        if token is None or not hmac.compare_digest(_digest(given), token.digest):
            raise UnauthorizedError("the operator's token is missing or wrong")
        return Principal(token.name, token.scope, token.api, token.expires_at, token.id)

    def check_validity(self, principal: Principal) -> None:
        """Check that a client's token has neither expired nor been revoked. Raises: UnauthorizedError."""
        if principal.token_id and principal.token_id not in self._tokens:
            raise UnauthorizedError(f"the token {principal.name!r} was revoked")
        if principal.expires_at is not None and principal.expires_at <= self._clock():
            raise UnauthorizedError(
                f"the token {principal.name!r} expired at {principal.expires_at:%Y-%m-%d %H:%M} UTC; "
                "an admin creates another one with `cortex tokens create`"
            )

    def list(self) -> list[Json]:
        """Return id, name, scope, API, times of creation and expiry of every token, oldest first."""
        return [self._to_json(token) for token in self._tokens.values()]

    async def create(
        self, name: str | None, scope: TokenScope, api: str | None = None, expires_in_s: float | None = None
    ) -> Json:
        """Create a token; `name` defaults to its scope and API. The API need not be deployed.

        The result is that of `list`, with the secret in `token`. Raises: InputError, ConflictError.
        """
        if api is not None and scope not in _LIMITABLE:
            raise InputError(f"a token with the scope {scope} can't be limited to an API; only read and deploy can")
        if api is not None and not _API.fullmatch(api):
            raise InputError(f"{api!r} can't be the name of an API; leave it out for a token for all APIs")
        if expires_in_s is not None and not 0 < expires_in_s <= _MAX_EXPIRY_S:
            raise InputError("a token must expire in more than 0 seconds and less than 100 years")
        if len(self._tokens) >= MAX_TOKENS:
            raise InputError(f"there are {MAX_TOKENS} tokens already; revoke some first: `cortex tokens list`")
        name = self._free_name(f"{scope}-{api}" if api else str(scope)) if name is None else name
        self._check_name(name)
        token_id = secrets.token_hex(_ID_BYTES)
        text = f"ct_{token_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
        now = self._clock()
        expires_at = now + timedelta(seconds=expires_in_s) if expires_in_s else None
        # One round of SHA-256 is enough for 256 random bits, as for API keys.
        token = StoredToken(token_id, name, scope, api, _digest(text.encode()), now, expires_at)
        self._tokens[token.id] = token
        try:
            await asyncio.to_thread(self._store.add, token)
        except BaseException:
            del self._tokens[token.id]
            raise
        return {**self._to_json(token), "token": text}

    async def revoke(self, token: str) -> Json:
        """Revoke the token with this id or name and return it. Raises: NotFoundError."""
        found = self._tokens.get(token) or next((each for each in self._tokens.values() if each.name == token), None)
        if found is None:
            raise NotFoundError(f"there is no token {token!r}; `cortex tokens list` shows all ids and names")
        await asyncio.to_thread(self._store.remove, found.id)
        self._tokens.pop(found.id, None)
        return self._to_json(found)

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} is not a valid name of a token: use letters, digits, dots, dashes, underscores")
        if name == ADMIN_NAME:
            raise ConflictError(f"the name {ADMIN_NAME!r} belongs to the token in CORTEX_HOME/token; choose another")
        # The audit log has only the name.
        if taken := next((token for token in self._tokens.values() if token.name == name), None):
            raise ConflictError(f"there is a token {name!r} (id {taken.id}) already; choose another name, or revoke it")

    def _free_name(self, wanted: str) -> str:
        taken = {token.name for token in self._tokens.values()} | {ADMIN_NAME}
        numbered = (f"{wanted}-{number}" for number in count(2))
        return next(name for name in chain((wanted,), numbered) if name not in taken)

    def _to_json(self, token: StoredToken) -> Json:
        return {
            "id": token.id,
            "name": token.name,
            "scope": token.scope,
            "api": token.api,
            "created_at": token.created_at.isoformat(),
            "expires_at": token.expires_at and token.expires_at.isoformat(),
            "is_expired": token.expires_at is not None and token.expires_at <= self._clock(),
        }


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()
