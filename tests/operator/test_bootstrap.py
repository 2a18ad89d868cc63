"""What an operator keeps in its home before it serves."""

from __future__ import annotations

from pathlib import Path

from cortex.home import Home
from cortex.installation import Installation
from cortex.operator.bootstrap import ensure_token, save_settings
from cortex.operator.settings import OperatorSettings
from cortex.telemetry import Logger
from cortex.tls import CertificateFiles

LOGGER = Logger("test")


def test_token_is_made_once_is_private_and_can_be_an_argument_of_a_command(home: Home) -> None:
    home.create()
    token = ensure_token(home)
    assert token.isalnum() and len(token) >= 32
    assert home.token_file.stat().st_mode & 0o777 == 0o600
    assert ensure_token(home) == token
    home.token_file.write_text("")  # as one that was killed before it wrote leaves it
    assert ensure_token(home).isalnum()


def test_settings_are_kept_beside_what_the_installation_is_made_of(home: Home) -> None:
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


def test_an_operator_runs_on_where_its_settings_can_not_be_kept(home: Home) -> None:
    (home.path / "installation.json").mkdir()
    save_settings(home, OperatorSettings(), LOGGER)
