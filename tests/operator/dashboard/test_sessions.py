"""Sessions: a code works once and not for long; a session ends with its token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.errors import ForbiddenError, UnauthorizedError
from cortex.lifecycle import TokenScope
from cortex.operator.access.tokens import Principal, Tokens
from cortex.operator.dashboard.sessions import CODE_S, MAX_CODES, MAX_SESSIONS, SESSION_S, Sessions
from cortex.state.database import open_sqlite
from cortex.state.queries.tokens import TokenStore

ADMIN = Principal("admin", TokenScope.ADMIN)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[Tokens]:
    engine = open_sqlite(tmp_path / "state.db")
    yield Tokens(TokenStore(engine), "a" * 64)
    engine.dispose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(tokens: Tokens, clock: Clock) -> Sessions:
    return Sessions(tokens, clock)


def test_a_code_signs_in_once(sessions: Sessions) -> None:
    code = sessions.create_code(ADMIN, "admin (ada)")
    session = sessions.find(sessions.sign_in(code))
    assert (session.principal, session.caller) == (ADMIN, "admin (ada)")
    with pytest.raises(UnauthorizedError, match="used before"):
        sessions.sign_in(code)


def test_a_code_expires(sessions: Sessions, clock: Clock) -> None:
    code = sessions.create_code(ADMIN, "admin")
    clock.now += CODE_S
    with pytest.raises(UnauthorizedError, match="older than a minute"):
        sessions.sign_in(code)


@pytest.mark.parametrize("cookie", ["", "x", "ü", "\udcff"])
def test_an_invented_cookie_is_no_session(sessions: Sessions, cookie: str) -> None:
    with pytest.raises(UnauthorizedError, match="not signed in"):
        sessions.find(cookie)
    with pytest.raises(UnauthorizedError):
        sessions.sign_in(cookie)


def test_a_code_is_no_cookie_and_a_cookie_is_no_code(sessions: Sessions) -> None:
    code = sessions.create_code(ADMIN, "admin")
    with pytest.raises(UnauthorizedError):
        sessions.find(code)
    cookie = sessions.sign_in(code)
    with pytest.raises(UnauthorizedError):
        sessions.sign_in(cookie)


def test_a_session_ends_after_hours_and_when_it_is_signed_out(sessions: Sessions, clock: Clock) -> None:
    first, second = (sessions.sign_in(sessions.create_code(ADMIN, "admin")) for _ in range(2))
    sessions.sign_out(first)
    with pytest.raises(UnauthorizedError):
        sessions.find(first)
    clock.now += SESSION_S
    with pytest.raises(UnauthorizedError):
        sessions.find(second)


def test_a_session_ends_when_its_token_is_revoked(sessions: Sessions, tokens: Tokens) -> None:
    made = asyncio.run(tokens.create("ci", TokenScope.READ))
    principal = tokens.identify(f"Bearer {made['token']}")
    cookie, code = sessions.sign_in(sessions.create_code(principal, "ci")), sessions.create_code(principal, "ci")
    asyncio.run(tokens.revoke("ci"))
    asyncio.run(tokens.create("ci", TokenScope.READ))  # another token of the same name
    with pytest.raises(UnauthorizedError, match="the token 'ci' was revoked"):
        sessions.find(cookie)
    with pytest.raises(UnauthorizedError, match="the token 'ci' was revoked"):
        sessions.sign_in(code)


def test_the_number_of_codes_and_sessions_is_bounded(sessions: Sessions) -> None:
    codes = [sessions.create_code(ADMIN, "admin") for _ in range(MAX_CODES + 1)]
    with pytest.raises(UnauthorizedError):
        sessions.sign_in(codes[0])
    cookies = [sessions.sign_in(codes[1])]
    cookies += [sessions.sign_in(sessions.create_code(ADMIN, "admin")) for _ in range(MAX_SESSIONS)]
    with pytest.raises(UnauthorizedError):
        sessions.find(cookies[0])
    sessions.find(cookies[-1])


def test_a_token_cannot_end_the_sessions_and_codes_of_another(sessions: Sessions, tokens: Tokens) -> None:
    made = asyncio.run(tokens.create("watcher", TokenScope.READ))
    reader = tokens.identify(f"Bearer {made['token']}")
    cookie, code = sessions.sign_in(sessions.create_code(ADMIN, "admin")), sessions.create_code(ADMIN, "admin")
    for _ in range(MAX_SESSIONS + 1):
        sessions.sign_in(sessions.create_code(reader, "watcher"))
    for _ in range(MAX_CODES + 1):
        sessions.create_code(reader, "watcher")
    assert sessions.find(cookie).principal == ADMIN
    sessions.sign_in(code)


def test_a_code_that_is_looked_at_is_not_used(sessions: Sessions) -> None:
    code = sessions.create_code(ADMIN, "admin")
    assert sessions.check_code(code) == sessions.check_code(code) == ADMIN
    sessions.sign_in(code)
    with pytest.raises(UnauthorizedError, match="used before"):
        sessions.check_code(code)


def test_a_cookie_of_another_server_neither_ends_nor_replaces_a_session(sessions: Sessions) -> None:
    one, other = (sessions.sign_in(sessions.create_code(ADMIN, "admin")) for _ in range(2))
    assert sessions.find("tossed", one, one).principal == ADMIN
    with pytest.raises(UnauthorizedError, match="two sessions"):
        sessions.find(one, other)


def test_a_form_needs_the_token_of_its_session(sessions: Sessions) -> None:
    one, other = (sessions.find(sessions.sign_in(sessions.create_code(ADMIN, "admin"))) for _ in range(2))
    one.check_csrf(one.csrf)
    for wrong in ("", "ü", other.csrf):
        with pytest.raises(ForbiddenError, match="not of this session"):
            one.check_csrf(wrong)


def test_a_notice_is_shown_once(sessions: Sessions) -> None:
    session = sessions.find(sessions.sign_in(sessions.create_code(ADMIN, "admin")))
    session.notice = "updating iris"
    assert (session.pop_notice(), session.pop_notice()) == ("updating iris", "")
