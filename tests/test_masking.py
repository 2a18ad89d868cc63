"""Masking of values whose keys say that they are secret."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.masking import (
    MASK,
    is_credential,
    is_secret,
    mask_change,
    mask_known,
    mask_secrets,
    mask_spec,
    secret_values,
    secrets_of_environment,
)


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
        *("passcode", "passcode1", "DB_PASSWORD_2", "api_key2", "pw"),
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
        ("postgresql://ada:hunt@er2@db/x?a=me@b", f"postgresql://ada:{MASK}@db/x?a=me@b"),
        ("http://localhost:8080/a?mail=me@b", "http://localhost:8080/a?mail=me@b"),
        ("Bearer hunter2", f"Bearer {MASK}"),
        ("password = hunter2", f"password = {MASK}"),
        ("password : hunter2", f"password : {MASK}"),
        ("password   =\thunter2", f"password   =\t{MASK}"),
        ('"password" = "hunter2"', f'"password" = {MASK}'),
        ("auth: none, token: null", "auth: none, token: null"),
        ("unexpected token : at line 3", "unexpected token : at line 3"),
        ("if token == given: pass", "if token == given: pass"),
        ({"note": "send Authorization: bearer hunter2, please"}, {"note": f"send Authorization: {MASK}"}),
        ("Basic YWRhOmh1bnRlcjI=", f"Basic {MASK}"),
        ("X-API-Key: hunter2", f"X-API-Key: {MASK}"),
        (
            ["curl", "-H", "Ocp-Apim-Subscription-Key: hunter2", "x"],
            ["curl", "-H", f"Ocp-Apim-Subscription-Key: {MASK}", "x"],
        ),
        (["serve", "--token", "hunter2", "--port", "80"], ["serve", "--token", MASK, "--port", "80"]),
        (["serve", "--api-key=hunter2", "-v"], ["serve", f"--api-key={MASK}", "-v"]),
        ("serve --hf-token hunter2 --max-tokens 5", f"serve --hf-token {MASK} --max-tokens 5"),
        ("serve --password 'hunter 2' x", f"serve --password {MASK} x"),
        ("PGPASSWORD=hunter2 psql host=h password=hunter2", f"PGPASSWORD={MASK} psql host=h password={MASK}"),
        ("AccountName=a;AccountKey=hunter2;x", f"AccountName=a;AccountKey={MASK};x"),
        ("https://h/x?token=a&n=1&sig=b#c", f"https://h/x?token={MASK}&n=1&sig={MASK}"),
        ("https://h/x?key=a&code=b&state=ok", f"https://h/x?key={MASK}&code={MASK}&state=ok"),
        ({"env": [{"name": "DB_PASSWORD", "value": "hunter2"}]}, {"env": [{"name": "DB_PASSWORD", "value": MASK}]}),
        ("ck_0123456789_" + "k" * 43 + " it is", f"{MASK} it is"),
        ("ghp_" + "a1" * 18, MASK),
        (["author", "Ada", "--tokenizer", "bpe"], ["author", "Ada", "--tokenizer", "bpe"]),
        ("foo-token==1.2", "foo-token==1.2"),
        ("basic authentication fails: no such user", "basic authentication fails: no such user"),
        ("max_tokens=5 path=a", "max_tokens=5 path=a"),
        ("log in with password: hunter2 please", f"log in with password: {MASK} please"),
        ("user: ada\npassword: 'hunter 2'\nport: 5", f"user: ada\npassword: {MASK}\nport: 5"),
        ('{"password": "hunter2", "max_tokens": 5}', f'{{"password": {MASK}, "max_tokens": 5}}'),
        ("the token: see below; eos_token: </s>", f"the token: {MASK} below; eos_token: </s>"),
        ("cached token://a and std::secret::b", "cached token://a and std::secret::b"),
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
        (
            "handler.command: ['serve', '--port'] → serve --token a",
            f"handler.command: ['serve', '--port'] → serve --token {MASK}",
        ),
        ("handler.config.note: a → Bearer b", f"handler.config.note: a → Bearer {MASK}"),
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


def test_a_spec_shows_no_secret_in_other_places_either() -> None:
    random = "0123456789abcdefghij"
    spec = {
        "name": "hunter2",
        "handler": {
            "type": "command",
            "env": {"DB": "postgresql://u:hunter2@h/d", "ID": random, "MODE": "production"},
            "config": {"password": "s3cret", "note": "hunter2 and s3cret in production", "list": [random]},
            "command": ["serve", "--login", "hunter2", "--url", "https://u:p@h", "dotenv-value"],
        },
        "networking": {"auth": "api_key", "record": {"to": "https://h/x?sig=abc"}},
        "schedule": {"cron": "* * * * *", "submission": {"query": "s3cret"}},
    }
    assert mask_spec(spec, {"MY_TOKEN": "dotenv-value"}) == {
        "name": "hunter2",
        "handler": {
            "type": "command",
            "env": dict.fromkeys(("DB", "ID", "MODE"), MASK),
            "config": {"password": MASK, "note": f"{MASK} and {MASK} in production", "list": [MASK]},
            "command": ["serve", "--login", MASK, "--url", f"https://u:{MASK}@h", MASK],
        },
        "networking": {"auth": "api_key", "record": {"to": f"https://h/x?sig={MASK}"}},
        "schedule": {"cron": "* * * * *", "submission": {"query": MASK}},
    }


@pytest.mark.parametrize(
    "part",
    [
        *("eyJ-", "eyJ", "-----BEGIN ", "://a:", "--token ", "--a", "bearer ", "basic a", "a='", 'a="', "a: "),
        *("token: ", "sk-", "a-", "x-a: ", "key=", "ck_0", "?a&"),
    ],
)
def test_the_time_of_masking_grows_with_the_length_of_a_text_alone(part: str) -> None:
    assert time_of_masking(part) < 10 * time_of_masking("a quick brown fox=1, b: 2 ")


def time_of_masking(part: str) -> float:
    text, durations = (part * (1 << 16))[: 1 << 16], []
    for _ in range(3):
        began = time.process_time()
        mask_secrets(text)
        durations.append(time.process_time() - began)
    return min(durations)


def test_the_known_values_of_a_large_config_are_few() -> None:
    values = secret_values({"handler": {"config": {"password": [f"hunter{number}" for number in range(5000)]}}})
    assert len(values) <= 50


@pytest.mark.parametrize("key", ["eos_token", "padToken", "COMPASS", "bypass", "max_tokens"])
def test_ordinary_keys_are_no_secrets(key: str) -> None:
    assert mask_secrets({key: 7 if key == "max_tokens" else "</s>"}) == {key: 7 if key == "max_tokens" else "</s>"}


def test_texts_under_plural_tokens_are_masked() -> None:
    assert mask_secrets({"api_tokens": ["zz1", "zz2"], "pw": "x1"}) == {"api_tokens": MASK, "pw": MASK}


def test_words_and_paths_stay_readable_in_tracebacks() -> None:
    values = secrets_of_environment(
        {"GOOGLE_APPLICATION_CREDENTIALS": "/etc/gcp/key.json", "DB_PASSWORD": "handle", "TOKEN": "s3cret"}
    )
    text = 'File "main.py", line 4, in handle_post: could not open /etc/gcp/key.json, s3cret_post, s3cret'
    assert mask_known(text, values) == text.removesuffix("s3cret") + MASK


def test_the_name_of_a_model_is_no_secret() -> None:
    assert secret_values({}, {"MODEL_ID": "distilbert-base-uncased-v2", "ID": "0f3a9c8e7d6b5a4f0f3a9c8e"}) == (
        "0f3a9c8e7d6b5a4f0f3a9c8e",
    )


def test_texts_of_exceptions_show_no_secret_of_the_environment() -> None:
    values = secrets_of_environment(
        {"DB_PASSWORD": "hunter2", "URL": "redis://:s3cret@h", "PATH": "/usr/bin", "TOKEN": "1", "PWD": "/usr/bin"}
    )
    shown = mask_known("no login with hunter2 or s3cret at https://a:b@h, token=1 in /usr/bin", values)
    assert shown == f"no login with {MASK} or {MASK} at https://a:{MASK}@h, token=1 in /usr/bin"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "key",
            "access_key",
            "sig",
            "pwd",
            "code",
            "jwt",
            "sid",
            "connect.sid",
            "PHPSESSID",
            "X-Amz-Signature",
            "idToken",
        ),
        *(
            "X-Access-Key",
            "Ocp-Apim-Subscription-Key",
            "X-JWT",
            "X-Pwd",
            "X-CSRF",
            "X-XSRF-Token",
            "Cookie",
            "X-Api-Key",
        ),
    ],
)
def test_headers_and_query_parameters_with_credentials_are_recognized(name: str) -> None:
    assert is_credential(name) and is_credential(name.lower())


@pytest.mark.parametrize(
    "name", ["Idempotency-Key", "X-Cache-Key", "sort_key", "zipcode", "code-page", "signal", "side", "keys"]
)
def test_other_headers_and_query_parameters_are_recorded(name: str) -> None:
    assert not is_credential(name)
