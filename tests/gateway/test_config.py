"""The configuration text: its contents, and no injection of directives by names and paths."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import GatewayError
from cortex.gateway.backends import GatewaySockets
from cortex.gateway.config import CONFIG_FILE, GatewaySettings, RenderedConfig, render
from cortex.gateway.haproxy import find_binary
from cortex.gateway.maps import ROUTES_MAP, UNAVAILABLE_MAP
from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import ApiBackend, RoutingTable, Server, Share, Split

pytestmark = pytest.mark.processes

SOCKETS = GatewaySockets("/tmp/c/gateway.sock", "/tmp/c/successor.sock", "/tmp/c/inside.sock", "/tmp/c/refused.sock")
IRIS = ApiBackend("iris", "/iris", 1.5, 1000, 7, "starting", (Server("iris-1-0", "/tmp/c/iris-1-0", 3),))
SPECIAL = st.sampled_from("\n\r\t \"'\\%#$[]{}();,<>\x00\x7f\x85\u2028")
TROUBLE = st.text(alphabet=st.one_of(SPECIAL, st.characters(codec="utf-8")))


def rendered(*backends: ApiBackend, settings: GatewaySettings | None = None) -> RenderedConfig:
    return render(RoutingTable(backends), settings or GatewaySettings(), SOCKETS)


def section(config: str, title: str) -> list[str]:
    lines = config.splitlines()
    rest = lines[lines.index(title) + 1 :]
    return [line.strip() for line in rest[: next((i for i, line in enumerate(rest) if line[:2] != "  "), len(rest))]]


def test_requests_of_http2_count_for_their_address_like_connections() -> None:
    calls = replace(IRIS, api="calls", replica_protocol=Protocol.GRPC, servers=())
    made = render(RoutingTable((IRIS, calls), connections_per_address=9), GatewaySettings(max_buffers=100), SOCKETS)
    lines = section(made.config, "frontend gateway")
    assert "http-request deny deny_status 429 if { sc_conn_cur(3,cortex-streams) gt 9 }" in lines
    assert "cortex-streams" not in rendered(IRIS, settings=GatewaySettings(max_buffers=100)).config


def test_an_own_endpoint_precedes_derived_and_built_in_paths() -> None:
    info = replace(IRIS, api="info", endpoint="/iris/info", servers=())
    live = replace(IRIS, api="live", endpoint="/livez", servers=())
    routes = dict(line.split() for line in rendered(IRIS, info, live).files[ROUTES_MAP].splitlines())
    assert routes["/iris/info"] == "api:info"
    assert routes["/livez"] == "api:live"
    assert routes["/readyz"] == "cortex-health"


def test_what_commands_can_change_does_not_change_the_structure() -> None:
    before = rendered(IRIS).structure
    server = replace(IRIS.servers[0], name="iris-2-0", capacity=9)
    assert rendered(replace(IRIS, servers=(server,), unavailable="another")).structure == before
    for change in ({"timeout_s": 2.0}, {"endpoint": "/x"}, {"max_queue": 8}, {"max_body_bytes": 9}, {"api": "x"}):
        assert rendered(replace(IRIS, **change)).structure != before
    assert rendered(IRIS, settings=GatewaySettings(port=9)).structure != before
    assert rendered(IRIS, replace(IRIS, api="more", endpoint="/more")).structure != before


@given(TROUBLE)
def test_a_reason_is_one_line_of_its_map_and_valid_json(reason: str) -> None:
    result = rendered(replace(IRIS, unavailable=reason))
    assert result.config == rendered(IRIS).config
    assert re.fullmatch(r"api:iris [ -~]+\n", result.files[UNAVAILABLE_MAP])
    value = result.files[UNAVAILABLE_MAP].removeprefix("api:iris ").rstrip("\n")
    assert value == value.strip()
    assert json.loads(f'"{value}"') == (reason.strip()[:1000].strip() or "starting")


@given(TROUBLE)
def test_an_endpoint_is_one_key_of_the_map_or_is_refused(endpoint: str) -> None:
    try:
        result = rendered(replace(IRIS, endpoint="/" + endpoint))
    except GatewayError:
        assert re.search(r"[^!-~]", endpoint) or len(endpoint) > 1000
        return
    assert result.config.replace(result.structure, "") == rendered(IRIS).config.replace(rendered(IRIS).structure, "")
    assert all(
        re.fullmatch(r"/[!-~]* (api:iris|cortex-health)", line) for line in result.files[ROUTES_MAP].splitlines()
    )


@given(TROUBLE, st.sampled_from(["api", "name", "socket", "host"]))
def test_names_and_paths_can_not_inject_directives(value: str, place: str) -> None:
    backend, settings = IRIS, GatewaySettings()
    if place == "api":
        backend = replace(IRIS, api=value)
    elif place == "host":
        settings = GatewaySettings(host=value)
    else:
        server = replace(IRIS.servers[0], **{place: "/" + value if place == "socket" else value})
        backend = replace(IRIS, servers=(server,))
    try:
        result = rendered(backend, settings=settings)
    except GatewayError:
        return
    assert len(result.config.splitlines()) == len(rendered(IRIS).config.splitlines())
    assert not set(value) & set("\"'\\#$ \t\n\r{}") or place == "socket"
    assert not set(value) & set("\"'\\#$\n\r")


@pytest.mark.parametrize(
    "settings", [GatewaySettings(), GatewaySettings(host="::1", port=9, threads=4), GatewaySettings(host="*")]
)
def test_haproxy_accepts_every_kind_of_table(tmp_path: Path, settings: GatewaySettings) -> None:
    settings = replace(settings, max_connections=100)
    backends = (
        IRIS,
        replace(IRIS, api="a.b-c_D", endpoint="/~x/%20;#?", max_queue=0, unavailable="\n\"'#%[x]\\"),
        replace(IRIS, api="slow", endpoint="/", timeout_s=1e9, servers=()),
        replace(IRIS, api="quick", endpoint="/q", timeout_s=0.001, max_body_bytes=0),
        replace(IRIS, api="held", endpoint="/r", holds=True, access_log=True),
        replace(IRIS, api="jobs", endpoint="/j", servers=(), jobs_socket="/tmp/with space/jobs"),
        replace(IRIS, api="spaced", endpoint="/s", servers=(Server("s", "/tmp/with space/s", 0),)),
    )
    split = Split("s.p-l_it", "/%7e#", (Share("iris", 40), Share("quick", 60)), Share("slow", 5))
    # More than HAProxy takes in one line.
    keyed = (Split(f"keyed-{n}", f"/keyed/{n}", (Share("iris", 100),), needs_key=True) for n in range(200))
    result = render(RoutingTable(backends, (split, *keyed)), settings, SOCKETS)
    for name, text in result.files.items():
        (tmp_path / name).write_text(text)
    checked = subprocess.run(
        [find_binary(), "-c", "-q", "-f", CONFIG_FILE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
