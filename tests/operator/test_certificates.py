"""Loading and reloading of the served certificate."""

from __future__ import annotations

import contextlib
import shutil
import ssl
from pathlib import Path

import pytest

from cortex.errors import CertificateError
from cortex.operator.certificates import ServedCertificate
from cortex.operator.settings import OperatorSettings
from cortex.telemetry import Logger
from cortex.tls import CertificateFiles
from harness.servers.certificates import write_pair

pytestmark = pytest.mark.processes

LOGGER = Logger("test")


def presented_by(context: ssl.SSLContext) -> str:
    """Return the certificate that a server with this context presents, as PEM."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = trusting.wrap_bio(to_client, to_server, server_hostname="x")
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    der = client.getpeercert(binary_form=True)
    assert der is not None
    return ssl.DER_cert_to_PEM_cert(der)


def test_serves_renewed_files_once_certificate_and_key_match(tmp_path: Path) -> None:
    files, fingerprints = CertificateFiles(*write_pair(tmp_path, "old")), tmp_path / "fingerprints"
    first = files.certificate.read_text()
    served = ServedCertificate(files, fingerprints, LOGGER)
    assert served.context is not None
    assert presented_by(served.context) == first
    assert not served.reload()
    certificate, key = write_pair(tmp_path, "new", stem="new")
    shutil.copy(certificate, files.certificate)
    assert not served.reload()  # still the key of the old certificate
    assert presented_by(served.context) == first
    files.key.unlink()
    assert not served.reload()
    shutil.copy(key, files.key)
    assert served.reload() and not served.reload()
    assert presented_by(served.context) == certificate.read_text()
    assert len(set(fingerprints.read_text().split())) == 2
    assert served.has_name("new") and served.has_name("old") and not served.has_name("other")
    assert certificate.read_text() in served.pem
    ServedCertificate(files, fingerprints, LOGGER)
    assert len(fingerprints.read_text().split()) == 1


def test_rejects_unusable_files_at_startup(tmp_path: Path) -> None:
    with pytest.raises(CertificateError):
        ServedCertificate(CertificateFiles(tmp_path / "a", tmp_path / "b"), tmp_path / "fingerprints", LOGGER)
    assert not (tmp_path / "fingerprints").exists()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "https://c.org:1"), ("0.0.0.0", "https://c.org:1"), ("10.1.2.3", "https://10.1.2.3:1"),
     ("::", "https://c.org:1"), ("fd00::1", "https://[fd00::1]:1"), ("b.org", "https://b.org:1")],
)  # fmt: skip
def test_urls_have_the_first_name_without_a_wildcard(tmp_path: Path, host: str, expected: str) -> None:
    files = CertificateFiles(*write_pair(tmp_path, "*.org", "c.org", "d.org"))
    served = ServedCertificate(files, tmp_path / "fingerprints", LOGGER)
    assert served.apply_name(OperatorSettings(host=host, tls=files)).url(1) == expected


def test_serves_plain_http_without_a_certificate(tmp_path: Path) -> None:
    served = ServedCertificate(None, tmp_path / "fingerprints", LOGGER)
    assert (served.context, served.pem, served.reload(), served.has_name("a")) == (None, "", False, False)
    assert served.apply_name(OperatorSettings()).url(1) == "http://127.0.0.1:1"
