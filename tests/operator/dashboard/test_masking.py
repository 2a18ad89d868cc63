"""Masking of values whose keys say that they are secret."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.operator.dashboard.masking import MASK, is_secret, mask_change, mask_secrets


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
    ],
)
def test_changes_show_no_secrets(line: str, shown: str) -> None:
    assert mask_change(line) == shown
