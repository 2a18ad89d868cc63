"""HTTPS at the gateway: protocols, and the replacement of a certificate."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from cortex.gateway.config import CERTIFICATE_FILE
from cortex.home import Home
from cortex.tls import CertificateFiles, ServerCertificate
from harness.servers.certificates import write_pair
from harness.servers.upstream import Client, World, ask, backend, table, world

pytestmark = pytest.mark.processes


def loaded(folder: Path, name: str) -> ServerCertificate:
    return CertificateFiles(*write_pair(folder, name, stem=name)).load()


def context(*protocols: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if protocols:
        made.set_alpn_protocols(list(protocols))
    return made


class SecureClient(Client):
    """A connection over TLS."""

    def __init__(self, port: int, made: ssl.SSLContext | None = None) -> None:
        super().__init__(port)
        self._context = made or context()

    async def connect(self) -> asyncio.StreamWriter:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context)
        self.connects += 1
        return self.writer

    @property
    def secured(self) -> ssl.SSLObject:
        assert self.writer is not None
        return self.writer.get_extra_info("ssl_object")  # type: ignore[no-any-return]


async def shown(w: World) -> bytes | None:
    client = SecureClient(w.port)
    await client.connect()
    try:
        return client.secured.getpeercert(binary_form=True)
    finally:
        client.close()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_only_https_with_tls_1_2_or_later_is_accepted(home: Home, tmp_path: Path) -> None:
    async with world(home, certificate=loaded(tmp_path, "a").pem) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        client = SecureClient(w.port, context("h2", "http/1.1"))
        answer = await client.request("POST", "/iris", b"x" * 2_000_000, {})
        assert (answer.status, answer.json()["body"]) == (200, 2_000_000)
        assert client.secured.selected_alpn_protocol() == "http/1.1"
        assert (await client.get("/iris")).status == 200
        assert client.connects == 1
        client.close()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await ask(w.port, "/iris")
        old = context()
        old.set_ciphers("DEFAULT@SECLEVEL=0")  # otherwise OpenSSL offers TLS 1.2 or later only
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError):
            await SecureClient(w.port, old).connect()
        file = home.run_dir / "gateway" / CERTIFICATE_FILE
        assert file.stat().st_mode & 0o777 == 0o600


async def test_a_new_certificate_interrupts_no_request(home: Home, tmp_path: Path) -> None:
    async with world(home, certificate=loaded(tmp_path, "a").pem) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        before = await shown(w)
        inside, idle = SecureClient(w.port), SecureClient(w.port)
        assert (await idle.get("/iris")).status == 200
        slow = asyncio.create_task(inside.get("/iris?sleep=1"))
        new = loaded(tmp_path, "b")
        w.gateway.use_certificate(new.pem)
        await w.gateway.ensure_running()
        after = await shown(w)
        assert after != before and after == ssl.PEM_cert_to_DER_cert((tmp_path / "b.pem").read_text())
        assert ((await slow).status, (await idle.get("/iris")).status, idle.connects) == (200, 200, 1)
        inside.close()
        idle.close()
