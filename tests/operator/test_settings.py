"""URLs of the operator's settings."""

from __future__ import annotations

import pytest

from cortex.operator.settings import OperatorSettings


@pytest.mark.parametrize(
    ("host", "address", "url"),
    [
        ("0.0.0.0", "10.1.2.3", "http://10.1.2.3:1"),
        ("::", "fd00::7", "http://[fd00::7]:1"),
        ("0.0.0.0", "head.example.com", "http://127.0.0.1:1"),  # the operator might reject that name
        ("10.9.9.9", "10.1.2.3", "http://10.9.9.9:1"),
        ("127.0.0.1", "10.1.2.3", "http://127.0.0.1:1"),
    ],
)
def test_urls_have_the_cluster_address_when_listening_on_all_addresses(host: str, address: str, url: str) -> None:
    assert OperatorSettings(host=host).with_address(address).url(1) == url
