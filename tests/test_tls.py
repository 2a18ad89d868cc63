"""Validation of server certificates."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cortex.errors import CertificateError
from cortex.tls import CertificateFiles, fingerprint_of, has_name, shown_name
from harness.servers.certificates import write_pair

pytestmark = pytest.mark.processes


def test_loads_a_pair_with_names_expiry_and_chain(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "*.example.com", "cortex.example.com", "10.0.0.1")
    first = certificate.read_text()
    other, _ = write_pair(tmp_path, "authority", stem="authority")
    certificate.write_text("written by a tool\n" + first + other.read_text())
    found = CertificateFiles(certificate, key).load()
    assert (found.names, shown_name(found)) == (("*.example.com", "cortex.example.com"), "cortex.example.com")
    assert abs(found.ends_at - datetime.now(UTC) - timedelta(days=30)) < timedelta(hours=1)
    assert found.fingerprint == fingerprint_of(ssl.PEM_cert_to_DER_cert(first))
    assert found.pem.count("BEGIN CERTIFICATE") == 2 and found.pem.count("PRIVATE KEY") == 2
    assert "PRIVATE" not in repr(found)
    both = tmp_path / "both.pem"
    both.write_text(found.pem)
    assert CertificateFiles(both, both).load() == found


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.example.com", True), ("b.org", True), ("example.com", False), ("a.b.example.com", False), ("a", False)],
)
def test_a_wildcard_matches_one_label(name: str, expected: bool) -> None:
    assert has_name(("*.example.com", "b.org"), name) is expected


def test_reports_an_invalid_pair_with_file_and_reason(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "a")
    _, other = write_pair(tmp_path, "b", stem="other")
    _, locked = write_pair(tmp_path, "c", stem="locked", passphrase="secret")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    cases = (
        (tmp_path / "none.pem", key, "none.pem: the certificate can't be read (no such file or directory)"),
        (certificate, tmp_path / "none.pem", "none.pem: the key can't be read (no such file or directory)"),
        (tmp_path, key, "the certificate can't be read (is a directory)"),
        (key, key, "contains no certificate in PEM format"),
        (certificate, certificate, "contains no private key in PEM format"),
        (broken, key, "broken.pem: its first certificate can't be read"),
        (certificate, other, "other-key.pem: the key does not match the certificate"),
        (certificate, locked, "locked-key.pem: the key is encrypted"),
    )
    for first, second, said in cases:
        with pytest.raises(CertificateError) as raised:
            CertificateFiles(first, second).load()
        assert said in str(raised.value)
        assert raised.value.exit_code == 2


def test_warns_about_an_expired_certificate_and_a_readable_key(tmp_path: Path) -> None:
    files = CertificateFiles(*write_pair(tmp_path, "a", days=-1))
    files.key.chmod(0o640)
    over, readable = files.warnings(files.load(), datetime.now(UTC))
    assert "expired at" in over and "chmod 600" in readable
    fine = CertificateFiles(*write_pair(tmp_path, "a", stem="fine"))
    assert fine.warnings(fine.load(), datetime.now(UTC)) == []


def test_detects_replaced_files(tmp_path: Path) -> None:
    files = CertificateFiles(*write_pair(tmp_path, "a"))
    before = files.state()
    assert before == files.state()
    new, _ = write_pair(tmp_path, "a", stem="new")
    new.rename(files.certificate)
    assert files.state() not in (before, None)
    files.key.unlink()
    assert files.state() is None
