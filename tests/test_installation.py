"""What an installation is made of."""

from __future__ import annotations

import pytest

from cortex.errors import InputError
from cortex.home import Home
from cortex.installation import Installation

RAY = Installation(engine="ray", ray_address="10.0.0.1:6379")


def test_it_is_kept_for_the_next_operator(home: Home) -> None:
    assert Installation.read(home) == Installation()
    wanted = RAY.changed(gateways="group:edge", node_port=9000, database=None)
    wanted.write(home)
    assert Installation.read(home) == wanted
    assert (home.path / "installation.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("where", ["operator", "all", "group:edge", "group:a_b-c.d"])
def test_gateways_are_where_they_can_be(where: str) -> None:
    assert RAY.changed(gateways=where).gateways == where


@pytest.mark.parametrize("where", ["", "everywhere", "group:", "edge", "all\n", "group:a b"])
def test_gateways_are_nowhere_else(where: str) -> None:
    with pytest.raises(InputError, match="it is operator, all, or group:NAME"):
        RAY.changed(gateways=where)


def test_one_machine_has_one_gateway() -> None:
    with pytest.raises(InputError, match="is for --engine ray"):
        Installation().changed(gateways="all")
