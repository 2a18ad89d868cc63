from __future__ import annotations

import pytest

from cortex.gateway.addresses import host_of, is_address, is_path, numeric, server_address


@pytest.mark.parametrize(
    ("socket", "valid"),
    [
        ("127.0.0.1:80", True),
        ("10.0.0.1:65535", True),
        ("[::1]:80", True),
        ("[fe80::1]:8080", True),
        ("127.0.0.1", False),
        ("127.0.0.1:", False),
        ("127.0.0.1:0", False),
        ("127.0.0.1:65536", False),
        ("127.0.0.1:80 check", False),
        ("127.0.0.1 :80", False),
        ("[127.0.0.1]:80", False),
        ("::1:80", False),
        ("localhost:80", False),
        ("[fe80::1%eth0]:80", False),
        ("[fe80::1%\\n@1 shutdown frontend gateway\\n]:80", False),
        ("127.0.0.1:٨٠", False),
        ("", False),
    ],
)
def test_only_numeric_addresses_are_valid(socket: str, valid: bool) -> None:
    assert is_address(socket) is valid


@pytest.mark.parametrize(
    ("path", "valid"),
    [
        ("/run/s/a-0", True),
        ("/home/jörg/my models/s", True),
        ("/" + "x" * 106, True),
        ("/" + "x" * 107, False),
        ("run/s", False),
        ("/run/s\n", False),
        ("/jo'hn", False),
        ('/"', False),
        ("/$HOME", False),
        ("/a#b", False),
        ("/a,b", False),
        ("/a;b", False),
        ("", False),
    ],
)
def test_paths_with_characters_special_to_haproxy_are_invalid(path: str, valid: bool) -> None:
    assert is_path(path) is valid


def test_numeric_hosts_have_one_canonical_form() -> None:
    assert host_of("10.0.0.1:80") == numeric("10.0.0.1")
    assert host_of("[::1]:80") == numeric("0:0:0:0:0:0:0:1") == "::1"
    assert numeric("localhost") is None


def test_server_addresses_state_their_family() -> None:
    assert server_address("10.0.0.1:80") == "ipv4@10.0.0.1:80"
    assert server_address("[::1]:80") == "ipv6@[::1]:80"
