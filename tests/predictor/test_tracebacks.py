"""Exceptions of the user's code as text, however they are linked, and whatever their attributes do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest

from cortex.predictor.tracebacks import describe, format_user_traceback


def chain_of(length: int) -> BaseException:
    """Return the newest of several exceptions, each of which was raised while the one before was handled."""
    newest: BaseException = LookupError("first")
    for number in range(length - 1):
        later = ValueError(f"later {number}")
        later.__context__ = newest
        newest = later
    return newest


def causes_of(length: int) -> BaseException:
    newest = chain_of(length)
    each: BaseException | None = newest
    while each is not None and each.__context__ is not None:
        each.__cause__ = each.__context__
        each = each.__cause__
    return newest


def retry() -> BaseException:
    def look(n: int) -> object:
        try:
            return {}["x"]
        except KeyError:
            return look(n)

    try:
        look(0)
    except RecursionError as error:
        return error
    raise AssertionError


def nested_groups(depth: int) -> BaseException:
    group: Exception = ValueError("innermost")
    for _ in range(depth):
        group = ExceptionGroup("nested", [group, TypeError("beside")])
    return group


def cycle() -> BaseException:
    first, second = ValueError("one"), TypeError("two")
    first.__context__, second.__cause__ = second, first
    return first


def groups_in_chains(length: int) -> BaseException:
    newest: Exception = ValueError("innermost")
    for _ in range(length):
        later = ExceptionGroup("group", [KeyError("member"), newest])
        later.__context__ = newest
        newest = later
    return newest


class Hostile(Exception):
    """An exception whose attribute raises."""


def hostile(name: str, error: type[BaseException]) -> BaseException:
    def fail(self: object) -> object:
        raise error("of an attribute")

    members = {name: fail if name == "__str__" else property(fail)}
    return type("Hostile", (Hostile,), members)("message")


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda: chain_of(50), "ValueError: later 48"),
        (lambda: chain_of(50_000), "ValueError: later 49998"),
        (lambda: causes_of(50_000), "ValueError: later 49998"),
        (retry, "RecursionError: maximum recursion depth exceeded"),
        (lambda: nested_groups(150), "nested (2 sub-exceptions)"),
        (lambda: ExceptionGroup("wide", [ValueError(str(n)) for n in range(50_000)]), "and 49985 more exceptions"),
        (cycle, "ValueError: one"),
        (lambda: groups_in_chains(200), "ExceptionGroup: group (2 sub-exceptions)"),
        (lambda: hostile("__str__", SystemExit), "<exception str() failed>"),
        (lambda: hostile("__notes__", SystemExit), "Hostile, which can't be formatted: SystemExit"),
        (lambda: hostile("__notes__", RecursionError), "Hostile, which can't be formatted: RecursionError"),
        (lambda: hostile("__cause__", KeyboardInterrupt), "Hostile, which can't be formatted: KeyboardInterrupt"),
        (lambda: hostile("__traceback__", ValueError), "Hostile, which can't be formatted: ValueError"),
    ],
)
def test_every_exception_is_formatted_soon_and_briefly(make: Callable[[], BaseException], last: str) -> None:
    error = make()
    began = time.process_time()
    text = format_user_traceback(error)
    assert time.process_time() - began < 5
    assert last in text
    assert text.count("\n") < 1000


def test_the_newest_and_the_first_exceptions_of_a_long_chain_are_shown() -> None:
    lines = format_user_traceback(chain_of(1000)).splitlines()
    assert lines[:2] == ["LookupError: first", "[899 exceptions after this one are left out]"]
    assert lines[-1] == "ValueError: later 998"
    assert sum(line.startswith("ValueError: later") for line in lines) == 100


def test_a_raised_exception_has_its_frames_even_if_it_cannot_be_formatted() -> None:
    with contextlib.suppress(Hostile):
        error = hostile("__notes__", ValueError)
        raise error
    text = format_user_traceback(error)
    assert text.startswith("Traceback (most recent call last):\n")
    assert "raise error" in text


def test_secrets_of_the_environment_are_in_no_text_of_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    error = ConnectionError("no login with hunter2 at postgresql://app:s3cret@db/prod")
    for text in (describe(error), format_user_traceback(error)):
        assert "ConnectionError: no login with ******** at postgresql://app:********@db/prod" in text
