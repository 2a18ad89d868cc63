"""Sessions of the dashboard: a one-time code becomes a cookie, and the operator's token never enters a URL.

```text
 token ──POST /v1/dashboard/codes──▶ code, for a minute ──confirmed once in a browser──▶ session, for 12 hours
                                          │                                                │
                                          ▼ used again, or too late                        ▼ signed out, token revoked
                                       refused                                             ended
```

A session permits what the token permits that created its code. Codes and sessions are in memory: they end with the
operator.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from cortex.errors import ForbiddenError, UnauthorizedError
from cortex.operator.access.tokens import Principal, Tokens

CODE_S = 60.0
SESSION_S = 12 * 3600.0
#: Limits for each token, so that no token ends what another has.
MAX_CODES = 20
MAX_SESSIONS = 100
_SECRET_BYTES = 32
_OPEN_AGAIN = "open the dashboard with `cortex dashboard`"


@dataclass
class DashboardSession:
    """A browser that is signed in."""

    principal: Principal
    caller: str  #: who it is, for the history of APIs
    expires_at: float  #: of the clock of `Sessions`
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(_SECRET_BYTES))
    notice: str = ""  #: result of the last change, for the next page

    def check_csrf(self, token: str) -> None:
        """Check the token of a form, which pages of other servers can't read. Raises: ForbiddenError."""
        if not hmac.compare_digest(token.encode(), self.csrf.encode()):
            raise ForbiddenError("this form is not of this session; reload the page and try again")

    def pop_notice(self) -> str:
        """Return the notice once."""
        notice, self.notice = self.notice, ""
        return notice


@dataclass(frozen=True)
class _Code:
    principal: Principal
    caller: str
    expires_at: float


class _Expires(Protocol):
    @property
    def principal(self) -> Principal: ...

    @property
    def expires_at(self) -> float: ...


T = TypeVar("T", bound=_Expires)


class _Secrets(Generic[T]):
    """Values by the hash of their secret, so that no comparison takes a time that depends on it.

    Each token has at most `limit`.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._values: dict[str, T] = {}

    def add(self, value: T) -> str:
        """Return the secret of a value. Beyond the limit, the oldest value of the same token is removed."""
        now = self._clock()
        self._values = {digest: each for digest, each in self._values.items() if each.expires_at > now}
        owner = value.principal.token_id
        own = [digest for digest, each in self._values.items() if each.principal.token_id == owner]
        for digest in own[: max(0, len(own) - self._limit + 1)]:
            del self._values[digest]
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        self._values[_digest(secret)] = value
        return secret

    def get(self, secret: str) -> T | None:
        value = self._values.get(_digest(secret))
        return value if value is not None and value.expires_at > self._clock() else None

    def pop(self, secret: str) -> T | None:
        value = self._values.pop(_digest(secret), None)
        return value if value is not None and value.expires_at > self._clock() else None


class Sessions:
    """Codes and sessions of this operator."""

    def __init__(self, tokens: Tokens, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock
        self._codes: _Secrets[_Code] = _Secrets(MAX_CODES, clock)
        self._sessions: _Secrets[DashboardSession] = _Secrets(MAX_SESSIONS, clock)

    def create_code(self, principal: Principal, caller: str) -> str:
        """Return a code that `sign_in` accepts once within `CODE_S`."""
        return self._codes.add(_Code(principal, caller, self._clock() + CODE_S))

    def check_code(self, code: str) -> Principal:
        """Return whose session a code begins, without using it. Raises: UnauthorizedError."""
        return self._valid(self._codes.get(code)).principal

    def sign_in(self, code: str) -> str:
        """Return the value of the cookie of a new session. Raises: UnauthorizedError."""
        found = self._valid(self._codes.pop(code))
        return self._sessions.add(DashboardSession(found.principal, found.caller, self._clock() + SESSION_S))

    def find(self, *cookies: str) -> DashboardSession:
        """Return the session of the only cookie that has one. Raises: UnauthorizedError.

        Any server of the same host, such as an API, may set a cookie of this name beside the operator's. If it has no
        session, it is ignored; if it has another one, nobody can tell whose it is.
        """
        sessions = [session for cookie in set(cookies) if (session := self._sessions.get(cookie)) is not None]
        if not sessions:
            raise UnauthorizedError(f"you are not signed in; {_OPEN_AGAIN}")
        if len(sessions) > 1:
            raise UnauthorizedError("this browser has two sessions; delete the cookies of this host, and sign in again")
        self._tokens.check_validity(sessions[0].principal)
        return sessions[0]

    def sign_out(self, *cookies: str) -> None:
        """End the sessions of cookies."""
        for cookie in cookies:
            self._sessions.pop(cookie)

    def _valid(self, code: _Code | None) -> _Code:
        if code is None:
            raise UnauthorizedError(f"this code was used before, or is older than a minute; {_OPEN_AGAIN}")
        self._tokens.check_validity(code.principal)
        return code


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
