"""HTTPS and API keys together, through the command line."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.installations.installation import Installation, write_project
from harness.ports import free_port
from harness.servers.certificates import write_pair
from harness.wait import wait_until

SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload, headers):
            return {"headers": sorted(headers)}
"""
CONFIG = """
    - name: iris
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {auth: api_key}
"""


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Installation]:
    """An installation that is not up yet."""
    home = Path(tempfile.mkdtemp(prefix="cx-"))
    made = Installation(home, free_port(), free_port())
    try:
        yield made
    finally:
        made.down()
        shutil.rmtree(home, ignore_errors=True)


def up(made: Installation, certificate: Path, key: Path, check: bool = True) -> str:
    ports = ("--gateway-port", str(made.gateway_port), "--operator-port", str(made.operator_port))
    done = made.cortex("up", *ports, "--tls-cert", certificate, "--tls-key", key, check=check)
    assert check or done.returncode == 2, done
    return done.stdout + done.stderr


def ask(made: Installation, certificate: Path, key: str) -> int:
    """Return the status that an ordinary client receives that trusts a certificate for `localhost`."""
    url = f"https://localhost:{made.gateway_port}/iris"
    request = urllib.request.Request(url, b"{}", {"content-type": "application/json", "x-api-key": key})
    try:
        context = ssl.create_default_context(cafile=certificate)
        return urllib.request.urlopen(request, timeout=30, context=context).status  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        return error.code


def test_invalid_files_are_reported_before_anything_starts(secured: Installation, tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "localhost")
    _, other = write_pair(tmp_path, "other", stem="other")
    assert "the key does not match the certificate" in up(secured, certificate, other, check=False)
    assert "can't be read" in up(secured, tmp_path / "none.pem", key, check=False)
    assert secured.cortex("up", "--tls-cert", certificate, check=False).returncode == 2
    assert not list(secured.home.glob("run/*.json"))


def test_callers_with_a_key_are_served_over_https(secured: Installation, tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "localhost", "cortex.invalid")
    key.chmod(0o644)
    said = up(secured, certificate, key)
    assert "chmod 600" in said and f"https://localhost:{secured.gateway_port}" in said
    project = write_project(tmp_path / "p", SOURCE, CONFIG)
    sample = project / "sample.json"
    sample.write_text("{}")
    deployed = secured.cortex("deploy", project / "cortex.yaml").stdout
    assert f'https://localhost:{secured.gateway_port}/iris -H "X-API-Key: $CORTEX_API_KEY"' in deployed
    made = json.loads(secured.cortex("keys", "create", "a shop", "--api", "iris", "-o", "json").stdout)
    answer = secured.cortex("predict", "iris", sample, "--api-key", made["key"]).stdout
    assert not {"authorization", "x-api-key"} & set(json.loads(answer)["headers"])
    refused = secured.cortex("predict", "iris", sample, check=False)
    assert refused.returncode == 1 and "needs a key" in refused.stdout
    assert "answered with status 401; write --api-key KEY, or set CORTEX_API_KEY" in refused.stderr
    assert "a shop" in secured.cortex("keys", "list").stdout

    token = (secured.home / "token").read_text().strip()
    endpoint = f"https://localhost:{secured.operator_port}"
    secured.cortex("env", "configure", "lab", "--operator", endpoint, "--token", token)
    distrusted = secured.cortex("get", "-e", "lab", check=False)
    assert distrusted.returncode == 1 and "--ca FILE" in distrusted.stderr
    secured.cortex("env", "configure", "lab", "--operator", endpoint, "--token", token, "--ca", certificate)
    secured.cortex("predict", "-e", "lab", "iris", sample, "--api-key", made["key"])

    assert 29 < days_left(endpoint, token, certificate) < 30
    new, new_key = write_pair(tmp_path, "localhost", "new.invalid", stem="new", days=3)
    shutil.copy(new_key, key)
    shutil.copy(new, certificate)
    wait_until(lambda: _is_served(secured, new, made["key"]), message="the new certificate is served")
    secured.cortex("get", "-e", "lab")
    secured.cortex("predict", "iris", sample, "--api-key", made["key"])
    secured.cortex("keys", "revoke", made["id"])
    assert ask(secured, new, made["key"]) == 401
    assert 2 < days_left(endpoint, token, new) < 3


def days_left(operator: str, token: str, certificate: Path) -> float:
    """Return the days until the certificate expires, by the metric that the alert uses."""
    request = urllib.request.Request(f"{operator}/metrics", headers={"authorization": f"Bearer {token}"})
    context = ssl.create_default_context(cafile=certificate)
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        found = re.search(rb"^cortex_certificate_expiry_timestamp_seconds (\S+)$", answer.read(), re.MULTILINE)
    assert found is not None
    return (float(found[1]) - time.time()) / 86400


def _is_served(made: Installation, certificate: Path, key: str) -> bool:
    try:
        return ask(made, certificate, key) == 200
    except urllib.error.URLError as error:
        assert isinstance(error.reason, ssl.SSLCertVerificationError), error
        return False
