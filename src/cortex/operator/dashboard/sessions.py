"""Sessions of the dashboard: a one-time code becomes a cookie, and the operator's token never enters a URL.

```text
 token ──POST /v1/dashboard/codes──▶ code, for a minute ──opened once in a browser──▶ session, for 12 hours
                                          │                                             │
                                          ▼ opened again, or too late                   ▼ signed out, token revoked
                                       refused                                          ended
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
MAX_CODES = 100
MAX_SESSIONS = 1_000
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
    def expires_at(self) -> float: ...


T = TypeVar("T", bound=_Expires)


class _Secrets(Generic[T]):
    """Values by the hash of their secret, so that no comparison takes a time that depends on it; at most `limit`."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._values: dict[str, T] = {}

    def add(self, value: T) -> str:
        """Return the secret of a value. Beyond the limit, the oldest value is removed."""
        now = self._clock()
        self._values = {digest: each for digest, each in self._values.items() if each.expires_at > now}
        while len(self._values) >= self._limit:
            del self._values[next(iter(self._values))]
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

    def sign_in(self, code: str) -> str:
        """Return the value of the cookie of a new session. Raises: UnauthorizedError."""
        found = self._codes.pop(code)
        if found is None:
            raise UnauthorizedError(f"this code was used before, or is older than a minute; {_OPEN_AGAIN}")
        self._tokens.check_validity(found.principal)
        return self._sessions.add(DashboardSession(found.principal, found.caller, self._clock() + SESSION_S))

    def find(self, cookie: str) -> DashboardSession:
        """Return the session of a cookie. Raises: UnauthorizedError if it has ended."""
        session = self._sessions.get(cookie)
        if session is None:
            raise UnauthorizedError(f"you are not signed in; {_OPEN_AGAIN}")
        self._tokens.check_validity(session.principal)
        return session

    def sign_out(self, cookie: str) -> None:
        """End the session of a cookie."""
        self._sessions.pop(cookie)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
