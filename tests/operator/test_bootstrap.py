"""Token and settings files."""

from __future__ import annotations

from pathlib import Path

from cortex.home import Home
from cortex.installation import Installation
from cortex.operator.bootstrap import ensure_token, save_settings
from cortex.operator.settings import OperatorSettings
from cortex.telemetry import Logger
from cortex.tls import CertificateFiles

LOGGER = Logger("test")


def test_token_is_generated_once_private_and_usable_as_an_argument(home: Home) -> None:
    home.create()
    token = ensure_token(home)
    assert token.isalnum() and len(token) >= 32
    assert home.token_file.stat().st_mode & 0o777 == 0o600
    assert ensure_token(home) == token
    home.token_file.write_text("")  # left by an operator that was killed before it wrote
    assert ensure_token(home).isalnum()


def test_saves_settings_without_changing_the_rest_of_the_installation(home: Home) -> None:
    made = Installation(engine="ray", ray_address="10.0.0.1:6379", node_port=1)
    made.write(home)
    files = CertificateFiles(Path("/etc/c.pem"), Path("/etc/k.pem"))
    save_settings(home, OperatorSettings("0.0.0.0", 2, 3, tls=files), LOGGER)
    kept = Installation.read(home)
    assert (kept.engine, kept.node_port, kept.host, kept.operator_port, kept.gateway_port) == (
        "ray",
        1,
        "0.0.0.0",
        2,
        3,
    )
    assert (kept.tls_cert, kept.tls_key) == ("/etc/c.pem", "/etc/k.pem")
    save_settings(home, OperatorSettings(), LOGGER)
    assert Installation.read(home) == made


def test_ignores_settings_that_can_not_be_saved(home: Home) -> None:
    (home.path / "installation.json").mkdir()
    save_settings(home, OperatorSettings(), LOGGER)
