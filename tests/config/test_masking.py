"""Masking of values whose keys say that they are secret."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.config.masking import MASK, is_secret, mask_change, mask_secrets, mask_spec


@pytest.mark.parametrize(
    "key",
    [
        *(
            "password",
            "PASSWORD",
            "db_password",
            "dbPassword",
            "passwd",
            "pwd",
            "passphrase",
            "secret",
            "client_secret",
        ),
        *(
            "clientSecret",
            "secrets",
            "token",
            "access_token",
            "accessToken",
            "HF_TOKEN",
            "api_key",
            "apiKey",
            "API-KEY",
        ),
        *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "private_key", "credentials", "authorization", "Cookie", "jwt"),
    ],
)
def test_keys_of_secrets_are_recognized(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    ["key", "max_tokens", "tokens", "tokenizer", "signature_key", "keyboard", "monkey", "author", "path", "secretary"],
)
def test_other_keys_are_not(key: str) -> None:
    assert not is_secret(key)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"token": "abc"}, {"token": MASK}),
        ({"token": {"a": 1}}, {"token": MASK}),
        ({"token": "", "secret": None, "private": True}, {"token": "", "secret": None, "private": True}),
        ([{"a": {"password": 1}}], [{"a": {"password": MASK}}]),
        ("postgresql://ada:hunter2@db/x", f"postgresql://ada:{MASK}@db/x"),
        ({"url": "https://ada@host/a:b@c"}, {"url": "https://ada@host/a:b@c"}),
        ({"pem": "-----BEGIN RSA PRIVATE KEY-----\nMII"}, {"pem": MASK}),
        (1.5, 1.5),
    ],
)
def test_values_are_masked_at_any_depth(value: Any, expected: Any) -> None:
    assert mask_secrets(value) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_masking_keeps_the_shape(value: Any) -> None:
    assert type(mask_secrets(value)) is type(value)
    assert MASK in str(mask_secrets({"password": "hunter2", "rest": value}))
    assert "hunter2" not in str(mask_secrets({"password": "hunter2"}))


def test_deep_values_are_masked_as_a_whole() -> None:
    value: Any = "inside"
    for _ in range(2000):
        value = [value]
    assert "inside" not in str(mask_secrets(value))


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("handler.config.token: abc → def", "handler.config.token: changed"),
        ("handler.config.db.password: abc (new)", "handler.config.db.password: changed"),
        ("compute.cpu: 0.2 → 0.5", "compute.cpu: 0.2 → 0.5"),
        ("handler.config.url: x → redis://:hunter2@host", f"handler.config.url: x → redis://:{MASK}@host"),
        ("files changed: token", "files changed: token"),
        ("handler.config.token.inner: a → b", "handler.config.token.inner: changed"),
        ("handler.config.token: removed", "handler.config.token: removed"),
        ("schedule.submission.job.password: a → b", "schedule.submission.job.password: changed"),
        ("networking.auth: none → api_key", "networking.auth: none → api_key"),
    ],
)
def test_changes_show_no_secrets(line: str, shown: str) -> None:
    assert mask_change(line) == shown


def test_a_spec_shows_no_values_of_environment_variables_and_no_secrets_of_the_user() -> None:
    spec = {
        "name": "iris",
        "predictor": {"path": "p.py", "env": {"A": "1"}, "config": {"n": 2, "db": {"password": "x"}}},
        "networking": {"auth": "api_key"},
        "schedule": {"cron": "* * * * *", "submission": {"token": "x", "workers": 1}},
    }
    assert mask_spec(spec) == {
        "name": "iris",
        "predictor": {"path": "p.py", "env": {"A": MASK}, "config": {"n": 2, "db": {"password": MASK}}},
        "networking": {"auth": "api_key"},
        "schedule": {"cron": "* * * * *", "submission": {"token": MASK, "workers": 1}},
    }
    assert mask_spec({"name": "split", "schedule": None}) == {"name": "split", "schedule": None}
