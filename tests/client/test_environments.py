"""Environments: stored privately, with unique names; `local` always exists."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.client.environments import LOCAL, Environments
from cortex.client.local_operator import ListenOptions, start
from cortex.errors import InputError, NotFoundError, OperatorUnavailableError
from cortex.home import Home
from cortex.processes.identity import Identity
from harness.ports import free_port
from harness.servers.answering import Server, reply
from harness.wait import wait_until

pytestmark = pytest.mark.processes

URL = "https://cortex.example.com:8889"


@pytest.fixture
def environments(home: Home) -> Environments:
    return Environments.from_environ({"CORTEX_HOME": str(home.path)})


def test_local_is_the_default_and_needs_no_file(environments: Environments) -> None:
    assert environments.default == LOCAL
    assert [item.name for item in environments.known()] == [LOCAL]
    assert not environments.file.exists()


def test_local_without_an_operator_explains_how_to_start_it(environments: Environments) -> None:
    with pytest.raises(OperatorUnavailableError, match="cortex up"):
        environments.get().connect()


def test_local_of_a_dead_operator_is_unavailable(environments: Environments, home: Home) -> None:
    data = {"pid": os.getpid(), "create_time": 1.0, "url": "http://127.0.0.1:1", "gateway_url": "http://127.0.0.1:2"}
    (home.run_dir / "operator.json").write_text(json.dumps(data))

    with pytest.raises(OperatorUnavailableError, match="no operator runs"):
        environments.get(LOCAL).connect()


def test_local_of_a_stopped_operator_says_how_to_continue_it(environments: Environments, home: Home) -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = Identity.of(child.pid)
    try:
        data = identity.as_json() | {"url": "http://127.0.0.1:1", "gateway_url": "http://127.0.0.1:2"}
        (home.run_dir / "operator.json").write_text(json.dumps(data))
        child.send_signal(signal.SIGSTOP)
        wait_until(identity.is_stopped)

        with pytest.raises(OperatorUnavailableError, match=rf"is stopped by a signal.*`kill -CONT {child.pid}`"):
            environments.get(LOCAL).connect()
        with pytest.raises(OperatorUnavailableError, match="is stopped by a signal"):
            start(home, ListenOptions())  # which would wait a minute for its answer
    finally:
        child.kill()
        child.wait()


def test_a_configured_environment_is_stored_privately(environments: Environments) -> None:
    environments.configure("staging", URL + "/", "secret")

    transport = environments.get("staging").connect()

    assert (transport.url, transport.token) == (URL, "secret")
    assert stat.S_IMODE(environments.file.stat().st_mode) == 0o600
    assert list(environments.file.parent.glob(".cli-*")) == []


def test_a_change_without_an_endpoint_keeps_the_rest(environments: Environments) -> None:
    environments.configure("staging", URL, "secret", gateway_host="gw.example")
    environments.configure("staging", token="another")
    environment = environments.get("staging")
    assert (environment.gateway_host, environment.connect().url, environment.connect().token) == (
        "gw.example", URL, "another",
    )  # fmt: skip
    with pytest.raises(NotFoundError, match="no environment 'other'"):
        environments.configure("other", gateway_host="gw.example")


def test_the_token_is_never_shown(environments: Environments) -> None:
    environment = environments.configure("staging", URL, "secret")

    assert "secret" not in repr(environment) + json.dumps(environment.describe())


def test_the_file_of_environments_can_be_elsewhere(home: Home, tmp_path: Path) -> None:
    elsewhere = tmp_path / "config"
    environ = {"CORTEX_HOME": str(home.path), "CORTEX_CLI_CONFIG_DIR": str(elsewhere)}
    Environments.from_environ(environ).configure("staging", URL, "")

    assert (elsewhere / "cli.json").is_file()
    assert not (home.path / "cli.json").exists()


def test_the_default_follows_a_rename_and_falls_back_after_a_delete(environments: Environments) -> None:
    environments.configure("a", URL, "")
    environments.set_default("a")
    environments.rename("a", "b")
    assert environments.default == "b"
    assert environments.get().operator_endpoint == URL

    environments.delete("b")

    assert environments.default == LOCAL


def test_unknown_environments_are_reported_by_name(environments: Environments) -> None:
    for act in (
        lambda: environments.get("nope"),
        lambda: environments.delete("nope"),
        lambda: environments.set_default("nope"),
        lambda: environments.rename("nope", "b"),
    ):
        with pytest.raises(NotFoundError, match="nope"):
            act()


def test_local_can_be_neither_changed_nor_replaced(environments: Environments) -> None:
    environments.configure("a", URL, "")
    for act in (
        lambda: environments.delete(LOCAL),
        lambda: environments.rename(LOCAL, "b"),
        lambda: environments.rename("a", LOCAL),
        lambda: environments.configure(LOCAL, URL, ""),
    ):
        with pytest.raises(InputError):
            act()


def test_a_rename_does_not_overwrite(environments: Environments) -> None:
    environments.configure("a", URL, "1")
    environments.configure("b", URL, "2")

    with pytest.raises(InputError, match="already"):
        environments.rename("a", "b")


@pytest.mark.parametrize(
    "endpoint",
    ["", "cortex", "ftp://a", "http://", "http://a:99999", "http://a?x=1", "http://u:p@a", "//a", "http://[::"],
)
def test_rejects_invalid_operator_addresses(environments: Environments, endpoint: str) -> None:
    with pytest.raises(InputError, match="address"):
        environments.configure("a", endpoint, "")


@pytest.mark.parametrize("endpoint", ["http://a:1,", "http://a:1,b"])
def test_rejects_a_list_with_an_invalid_operator_address(environments: Environments, endpoint: str) -> None:
    with pytest.raises(InputError, match="address"):
        environments.configure("a", endpoint, "")


def test_of_several_operators_the_leader_is_used(environments: Environments) -> None:
    with closing(Server()) as standby, closing(Server()) as leader:
        gone = f"http://127.0.0.1:{free_port()}"
        urls = ", ".join((gone, standby.url, leader.url))
        there = environments.configure("there", urls, "t", gateway_host="api.example")
        assert there.operator_endpoint == urls.replace(" ", "")
        standby.answering = lambda handler: reply(handler, 200, b'{"ok": true, "leads": false, "leader": null}')
        leader.answering = lambda handler: reply(handler, 200, b'{"ok": true}')
        assert there.connect().url == leader.url
        assert there.check_host(f"{leader.url}/t")
        leader.answering = lambda handler: reply(handler, 500, b"")
        assert there.connect().url == standby.url
    assert there.connect().url == gone


@pytest.mark.parametrize("text", ["{", "[]", '{"environments": 1}'])
def test_an_invalid_file_is_reported_by_path(environments: Environments, text: str) -> None:
    environments.file.write_text(text)

    with pytest.raises(InputError, match=r"cli\.json"):
        environments.get()


@given(name=st.text(max_size=80))
def test_any_name_is_either_stored_unchanged_or_rejected(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("environments")
    environments = Environments(folder / "cli.json", Home(folder))
    try:
        environments.configure(name, URL, "t")
    except InputError:
        assert not environments.file.exists()
    else:
        assert [item.name for item in environments.known()] == [LOCAL, name]


@pytest.mark.parametrize(
    ("url", "is_own"),
    [
        ("http://127.0.0.1:8888/t", True),
        ("https://localhost/t", True),  # the same address
        ("http://API.example:1/t", True),
        ("http://127.0.0.2:8889/t", False),
        ("http://127.0.0.1@192.0.2.1/t", False),
        ("http://127.0.0.1.example/t", False),
        ("http://[", False),
        ("file:///etc/passwd", False),
        ("None", False),
    ],
)
def test_an_api_must_be_at_the_host_of_its_operator_or_gateway(
    environments: Environments, url: str, is_own: bool
) -> None:
    there = environments.configure("there", "http://127.0.0.1:8889", "t", gateway_host="api.EXAMPLE")
    if is_own:
        assert there.check_host(url) == environments.get("there").check_host(url) == url
    else:
        with pytest.raises(InputError, match="env configure there --gateway-host"):
            there.check_host(url)
    with pytest.raises(InputError, match="without a port"):
        environments.configure("there", "http://127.0.0.1:8889", "t", gateway_host="api.example:80")
