"""`cortex up`: immediate errors, and settings that later commands keep when they start an operator again."""

from __future__ import annotations

import configparser
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cortex.home import Home
from cortex.installation import Installation as Kept
from harness.installations.installation import CORTEX, ECHO_CONFIG, ECHO_SOURCE, ROOT, Installation, write_project
from harness.ports import free_port
from harness.servers.certificates import write_pair
from harness.wait import has_ended, wait_until

RAY = ("--engine", "ray", "--ray-address", "127.0.0.1:1")
ANNOUNCEMENT = "starting the operator\n"
OTHER_LOOPBACK = "127.0.0.2"
SOURCE = """
    import pathlib, time

    class Handler:
        def __init__(self, config):
            while not pathlib.Path(config["gate"]).exists():
                time.sleep(0.01)
            self.word = config["word"]

        def handle_post(self, payload):
            return self.word
"""
CONFIG = """
    - name: words
      kind: RealtimeAPI
      handler: {{type: python, path: handler.py, config: {{gate: {gate}, word: {word}}}}}
"""


@pytest.fixture
def cortex() -> Iterator[Installation]:
    """An installation that is not started yet."""
    with tempfile.TemporaryDirectory(prefix="cx-") as folder:
        made = Installation(Path(folder), free_port(), free_port())
        try:
            yield made
        finally:
            made.down()


def ports(cortex: Installation) -> tuple[str, ...]:
    return "--gateway-port", str(cortex.gateway_port), "--operator-port", str(cortex.operator_port)


def test_missing_ray_cluster_is_reported_at_once(cortex: Installation) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    node_port = ("--node-port", str(free_port()))
    done = cortex.cortex("up", "--engine", "ray", "--ray-address", nowhere, *node_port, *ports(cortex))
    problem = (
        f"no new replicas can be placed on the cluster: the head of Ray at {nowhere} can't be reached: "
        "connection refused; check --ray-address, and that Ray runs there"
    )
    assert f"warning: {problem}\n" in done.stderr
    assert problem in cortex.cortex("status").stdout
    assert cortex.status()["cluster"]["problem"] in problem


def test_down_leaves_nothing_outside_of_the_home(tmp_path: Path) -> None:
    cortex = Installation(tmp_path / "it's a home", free_port(), free_port())
    cortex.cortex("up", *ports(cortex))
    home = Home(cortex.home)
    assert home.sockets_dir.exists()
    cortex.down()
    assert not home.sockets_dir.exists()
    assert not home.metrics_dir.exists()


def test_a_restart_of_the_documented_unit_of_systemd_fails_no_request(cortex: Installation, tmp_path: Path) -> None:
    (text,) = re.findall(r"```ini\n(.*?)```", (ROOT / "docs" / "howto" / "systemd.md").read_text(), re.DOTALL)
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    start, stop = ([*CORTEX, *unit["Service"][name].split()[1:]] for name in ("ExecStart", "ExecStop"))
    assert unit["Service"]["KillMode"] == "process"

    def started() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*start, *ports(cortex)], env=cortex.environ)
        assert wait_until(lambda: (cortex.status()["operator"] or {}).get("pid") == process.pid, timeout_s=30)
        return process

    operators = [started()]
    try:
        cortex.cortex("deploy", write_project(tmp_path / "p", ECHO_SOURCE, ECHO_CONFIG))
        before = cortex.status()
        with cortex.load("/echo", 50) as load:
            assert subprocess.run(stop, env=cortex.environ, capture_output=True).returncode == 0
            assert operators[0].wait(30) == 0
            operators.append(started())
        after = cortex.status()
        assert (after["replicas"], after["gateway"]) == (before["replicas"], before["gateway"])
        assert load["statuses"].keys() == {"200"}, load["failures"]
    finally:
        for operator in operators:
            operator.kill()


@pytest.mark.parametrize("mode", [(), ("--stop-all",)])
def test_down_stops_only_the_operator_unless_everything_ends_with_it(
    cortex: Installation, mode: tuple[str, ...]
) -> None:
    process = subprocess.Popen([*CORTEX, "up", "--foreground", *mode, *ports(cortex)], env=cortex.environ)
    try:
        operator = wait_until(lambda: cortex.status()["operator"], timeout_s=30)
        gateway = cortex.status()["gateway"]["pid"]
        done = cortex.cortex("down", "--operator", check=False)
        if mode:
            assert (done.returncode, "so everything ends with it" in done.stderr) == (1, True)
            assert cortex.status()["operator"] == operator
        else:
            assert done.stdout == "stopped\n" and process.wait(30) == 0
            assert (cortex.status()["operator"], cortex.status()["gateway"]["pid"]) == (None, gateway)
            assert cortex.cortex("down", "--operator").stdout == "no operator was running\n"
        cortex.down()
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.long
def test_an_address_is_kept_for_the_next_operator_until_flags_replace_it(cortex: Installation, tmp_path: Path) -> None:
    cortex.cortex("up", "--host", OTHER_LOOPBACK, *ports(cortex))
    refused = cortex.cortex("up", "--host", "127.0.0.1", check=False)
    assert refused.returncode == 1
    assert f"the operator is already running at {OTHER_LOOPBACK}; to move it, run `cortex down` first" in refused.stderr
    killed = cortex.status()["operator"]["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: has_ended(killed))
    config = write_project(tmp_path / "p", ECHO_SOURCE, ECHO_CONFIG) / "cortex.yaml"
    operator, gateway = (f"http://{OTHER_LOOPBACK}:{port}" for port in (cortex.operator_port, cortex.gateway_port))
    assert f"started the operator at {operator} and the gateway at {gateway}" in cortex.cortex("deploy", config).stderr
    cortex.down()
    cortex.gateway_port = free_port()
    done = cortex.cortex("up", "--host", "127.0.0.1", "--gateway-port", str(cortex.gateway_port))
    assert done.stderr == ANNOUNCEMENT
    said = done.stdout
    assert f"operator: http://127.0.0.1:{cortex.operator_port}\n" in said
    assert f"gateway:  http://127.0.0.1:{cortex.gateway_port}\n" in said


@pytest.mark.long
def test_an_operator_that_was_started_by_another_version_is_reported(cortex: Installation) -> None:
    cortex.up()
    assert "warning" not in cortex.cortex("up").stderr
    file = cortex.home / "run" / "operator.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": "0.0.1"}))
    assert "warning: it runs version 0.0.1, and " in cortex.cortex("up").stderr


@pytest.mark.long
def test_a_port_in_use_is_not_kept(cortex: Installation) -> None:
    cortex.up()
    cortex.down()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flag in ("--gateway-port", "--operator-port"):
            refused = cortex.cortex("up", flag, port, check=False)
            assert refused.returncode == 1 and f"can't listen on 127.0.0.1:{port}: " in refused.stderr
            assert f"with `cortex up {flag}`, or another address with `--host`" in refused.stderr
        said = cortex.cortex("up").stdout
    assert f":{cortex.operator_port}\n" in said and f":{cortex.gateway_port}\n" in said


@pytest.mark.parametrize(
    ("mode", "flags", "message"),
    [
        ((), ("--database", "postgresql://127.0.0.1:1/cortex"), "can't be reached"),
        (("--foreground", "--stop-all"), ("--database", "postgresql://127.0.0.1:1/cortex"), "can't be reached"),
        ((), ("--database", "postgresql://me:%zz@127.0.0.1/cortex"), "with % and two hexadecimal digits"),
        ((), ("--engine", "ray", "--ray-address", "nowhere.invalid:6379"), "nowhere.invalid:6379 can't be found"),
    ],
)
def test_an_unusable_option_is_reported_and_not_kept(
    cortex: Installation, mode: tuple[str, ...], flags: tuple[str, ...], message: str
) -> None:
    refused = cortex.cortex("up", *mode, *ports(cortex), *flags, check=False)
    assert refused.returncode == (2 if mode else 1)
    assert message in refused.stderr and refused.stderr.removeprefix(ANNOUNCEMENT).count("\n") == 1
    assert not list(cortex.home.iterdir())


@pytest.mark.parametrize("mode", [(), ("--foreground", "--stop-all")])
def test_options_of_an_operator_that_did_not_start_are_not_kept(cortex: Installation, mode: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = cortex.cortex("up", *mode, *RAY, "--operator-port", port, check=False)
    assert refused.returncode == 1 and "can't listen on" in refused.stdout + refused.stderr
    assert Kept.read(Home(cortex.home)) == Kept()


def test_the_options_of_a_container_require_the_foreground(cortex: Installation) -> None:
    for flags, message in (
        (("--stop-all",), "--stop-all requires --foreground"),
        (("--foreground", "--drain", "5"), "--drain requires --foreground --stop-all"),
        (("--log-format", "json"), "--log-format requires --foreground --stop-all"),
        (("--foreground", "--stop-all", "--drain", "-1"), "--drain -1: must be 0 to 86400 seconds"),
    ):
        refused = cortex.cortex("up", *flags, check=False)
        assert (refused.returncode, refused.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize(
    ("flags", "both"),
    [
        (("--gateway-port", "18888", "--operator-port", "18888"), "--gateway-port and --operator-port are both 18888"),
        (("--gateway-port", "8889"), "--gateway-port and --operator-port are both 8889"),
        ((*RAY, "--node-port", "8888"), "--gateway-port and --node-port are both 8888"),
        ((*RAY, "--operator-port", "8890"), "--operator-port and --node-port are both 8890"),
    ],
)
def test_the_same_port_for_both_is_refused_before_anything_is_kept(
    cortex: Installation, flags: tuple[str, ...], both: str
) -> None:
    refused = cortex.cortex("up", *flags, check=False)
    assert refused.returncode == 2
    assert refused.stderr == f"error: {both}; choose different ports\n"
    assert not list(cortex.home.iterdir())


@pytest.mark.long
def test_a_certificate_is_kept_until_it_is_removed(cortex: Installation, tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "localhost")
    cortex.cortex("up", *ports(cortex), "--tls-cert", certificate, "--tls-key", key)
    refused = cortex.cortex("up", "--no-tls", check=False)
    assert refused.returncode == 1 and f"is already running with the certificate {certificate}" in refused.stderr
    cortex.down()
    certificate.unlink()
    refused = cortex.cortex("up", check=False)
    assert refused.returncode == 2
    error = refused.stderr.removeprefix(ANNOUNCEMENT)
    assert error.startswith(f"error: {certificate}: the certificate can't be read (no such file or directory);")
    assert "`cortex up --no-tls`" in error and error.count("\n") == 1
    for flags in (["--no-tls"], []):
        assert f"operator: http://127.0.0.1:{cortex.operator_port}" in cortex.cortex("up", *flags).stdout
        cortex.down()


def test_a_certificate_and_plain_http_exclude_each_other(cortex: Installation, tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "localhost")
    both = ("--tls-cert", certificate, "--tls-key", key, "--no-tls")
    refused = cortex.cortex("up", *ports(cortex), *both, check=False)
    assert refused.returncode == 2 and "--no-tls can't be combined" in refused.stderr


def test_ray_without_its_packages_is_refused_before_it_is_kept(cortex: Installation, tmp_path: Path) -> None:
    cortex.variables = without_ray(tmp_path)
    refused = cortex.cortex("up", *RAY, *ports(cortex), check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --engine ray needs cryptography and ray")
    assert "pip install 'cortex-serving[ray]'" in refused.stderr and "--engine local" not in refused.stderr
    assert not list(cortex.home.iterdir())


@pytest.mark.long
def test_a_home_on_ray_without_its_packages_reports_what_to_install_and_how_to_leave_ray(
    cortex: Installation, tmp_path: Path
) -> None:
    cortex.variables = without_ray(tmp_path)
    home = Home(cortex.home)
    addresses = {"operator_port": cortex.operator_port, "gateway_port": cortex.gateway_port}
    Kept(engine="ray", ray_address="127.0.0.1:1", gateways="all", **addresses).write(home)
    config = write_project(tmp_path / "p", ECHO_SOURCE, ECHO_CONFIG) / "cortex.yaml"
    for command in (["up"], ["deploy", str(config)]):
        refused = cortex.cortex(*command, check=False)
        assert "--engine ray needs cryptography and ray" in refused.stderr
        assert "`cortex up --engine local` switches back" in refused.stderr
        assert refused.stderr.removeprefix(ANNOUNCEMENT).count("\n") == 1
    assert "Traceback" not in cortex.log()
    cortex.cortex("up", "--engine", "local", *ports(cortex))


def without_ray(folder: Path) -> dict[str, str]:
    """Return variables with which Python finds neither Ray nor `cryptography`."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = sys.modules['cryptography'] = None\n")
    return {"PYTHONPATH": str(folder)}


def test_up_waits_until_apis_serve_and_requests_are_held_meanwhile(cortex: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    cortex.up()
    cortex.cortex("deploy", write_project(tmp_path / "p", SOURCE, CONFIG.format(gate=gate, word="one")))
    cortex.down()
    gate.unlink()
    with ThreadPoolExecutor() as pool:
        start = pool.submit(cortex.cortex, "up")
        try:
            wait_until(lambda: cortex.status()["replicas"], timeout_s=30)
            held = pool.submit(cortex.post, "/words", {})
            probes = {cortex.post("/words/v2/health/ready", method="GET").status for _ in range(20)}
            assert (probes, held.done(), start.done()) == ({503}, False, False)
        finally:
            gate.touch()
        assert (held.result().status, held.result().body) == (200, b"one")
        assert start.result().stdout.startswith("the operator is running\n")


@pytest.mark.long
def test_settings_can_be_changed_while_apis_start_after_down(cortex: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    project = write_project(tmp_path / "project", SOURCE, CONFIG.format(gate=gate, word="one"))
    cortex.up()
    cortex.cortex("deploy", project)
    cortex.down()
    gate.unlink()
    cortex.up()
    assert cortex.get("words")["status"]["status_code"] == "updating"
    write_project(project, SOURCE, CONFIG.format(gate=gate, word="two"))
    shown = cortex.cortex("deploy", "--no-wait", project).stdout.splitlines()
    assert shown == ["updating words (RealtimeAPI)", "  handler.config.word: one → two"]
    write_project(project, SOURCE, CONFIG.format(gate=gate, word="three"))
    refused = cortex.cortex("deploy", "--no-wait", project, check=False)
    assert "words is updating" in refused.stderr
    gate.touch()
    wait_until(lambda: cortex.post("/words", {}).body == b"two")
