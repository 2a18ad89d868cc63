"""Settings of an installation."""

from __future__ import annotations

import sys

import pytest

from cortex.errors import InputError
from cortex.home import Home
from cortex.installation import Installation

RAY = Installation(engine="ray", ray_address="10.0.0.1:6379")


def test_settings_are_stored_for_the_next_operator(home: Home) -> None:
    assert Installation.read(home) == Installation()
    wanted = RAY.changed(gateways="group:edge", node_port=9000, database=None)
    wanted.write(home)
    assert Installation.read(home) == wanted
    assert (home.path / "installation.json").stat().st_mode & 0o777 == 0o600


def test_the_limit_of_connections_per_address_stays(home: Home) -> None:
    Installation().changed(connections_per_address=9000).write(home)
    assert Installation.read(home).changed(connections_per_address=None).connections_per_address == 9000
    Installation.read(home).changed(connections_per_address=0).write(home)
    assert Installation.read(home) == Installation()
    (home.path / "installation.json").write_text('{"gateway_port": 0}')
    with pytest.raises(InputError, match="gateway_port is 0"):
        Installation.read(home)


def test_v2_at_the_root_stays_until_it_is_switched_off(home: Home) -> None:
    Installation().changed(v2_at_root=True).write(home)
    assert Installation.read(home).changed(v2_at_root=None).v2_at_root
    assert not Installation.read(home).changed(v2_at_root=False).v2_at_root
    (home.path / "installation.json").write_text('{"v2_at_root": 1}')
    with pytest.raises(InputError, match="v2_at_root is 1"):
        Installation.read(home)


@pytest.mark.parametrize("where", ["operator", "all", "group:edge", "group:a_b-c.d"])
def test_accepts_valid_gateways(where: str) -> None:
    assert RAY.changed(gateways=where).gateways == where


@pytest.mark.parametrize("where", ["", "everywhere", "group:", "edge", "all\n", "group:a b"])
def test_rejects_invalid_gateways(where: str) -> None:
    with pytest.raises(InputError, match="must be operator, all, or group:NAME"):
        RAY.changed(gateways=where)


def test_the_local_engine_has_one_gateway() -> None:
    with pytest.raises(InputError, match="requires --engine ray"):
        Installation().changed(gateways="all")


def test_switching_back_to_the_local_engine_resets_the_gateways() -> None:
    assert RAY.changed(gateways="all").changed(engine="local").gateways == "operator"


def test_the_database_of_the_home_can_be_chosen_again() -> None:
    shared = Installation(database="postgresql://localhost/cortex")
    assert shared.changed(node_port=9000).database == shared.database
    assert shared.changed(database="sqlite", node_port=9000) == Installation(node_port=9000)
    with pytest.raises(InputError, match="--database must be postgresql://USER:PASSWORD@HOST/NAME, or sqlite"):
        shared.changed(database="mysql://localhost/cortex")


@pytest.mark.parametrize("module", ["ray", "cryptography"])
def test_reports_missing_modules_of_the_ray_engine(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RAY.check_modules()
    monkeypatch.setitem(sys.modules, module, None)
    Installation().check_modules()
    with pytest.raises(InputError, match=rf"needs {module} .*`pip install 'cortex-serving\[ray\]'`"):
        RAY.check_modules(is_kept=False)
    with pytest.raises(InputError, match="; `cortex up --engine local` switches back"):
        RAY.check_modules()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '""',
        "7",
        '{"host": null}',
        '{"host": 5}',
        '{"tls_cert": 5}',
        '{"gateway_port": "x"}',
        '{"gateway_port": null}',
        '{"gateway_port": true}',
        '{"operator_port": 70000}',
        '{"engine": null}',
    ],
)
def test_reports_a_damaged_file(home: Home, text: str) -> None:
    (home.path / "installation.json").write_text(text)
    with pytest.raises(InputError, match=r"installation\.json can't be read .*run `cortex up` with its flags again"):
        Installation.read(home)


def test_reads_a_file_of_another_version(home: Home) -> None:
    (home.path / "installation.json").write_text('{"engine": "ray", "ray_address": "h:1", "database": null, "x": []}')
    assert Installation.read(home) == Installation(engine="ray", ray_address="h:1")
