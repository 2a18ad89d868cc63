"""Files with keys, among those of a project."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.projects.key_files import KeyFile, find_key_files, find_packed_key_files
from cortex.projects.project import ProjectFiles, pack

KEY = "ck_0123456789_" + "k" * 43


def found(folder: Path, files: dict[str, str]) -> list[KeyFile]:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    project = ProjectFiles.scan(folder, None)
    key_files = list(find_key_files(project))
    assert list(find_packed_key_files(pack(project))) == key_files
    return key_files


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B", "a private key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\r\nb3BlbnNzaC1rZXktdjEAAAAA", "a private key"),
        ("-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n", "a private key"),
        ('{"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0B"}', "a private key"),
        ("[default]\naws_access_key_id = AKIAABCDEFGHIJKLMNOP\n", "credentials of AWS"),
        (f"AWS_SECRET_ACCESS_KEY={'aB3/' * 10}\n", "credentials of AWS"),
        (f'{{"SecretAccessKey": "x", "awsSecretAccessKey": "{"aB3+" * 10}"}}', "credentials of AWS"),
        (f"key = '{KEY}'", "a key of cortex"),
        (KEY.replace("ck", "ct", 1), "a token of cortex"),
        ("ghp_" + "a1" * 18, "a token of GitHub"),
    ],
)
def test_files_with_keys_are_found_by_their_content(tmp_path: Path, text: str, what: str) -> None:
    assert [each.what for each in found(tmp_path, {"sub/any": text})] == [what]


def test_keys_are_found_by_line_and_key_stores_by_their_names(tmp_path: Path) -> None:
    files = {"client.P12": "", "handler.py": f"a\n\nkey = '{KEY}'\n{KEY}", ".env": f"KEY={KEY}", ".hidden": KEY}
    assert found(tmp_path, files) == [
        KeyFile("client.P12", "a key store", 0),
        KeyFile("handler.py", "a key of cortex", 3),
    ]


def test_other_files_have_no_keys(tmp_path: Path) -> None:
    files = {
        "a.py": 'if "-----BEGIN PRIVATE KEY-----" in text: raise ValueError("aws_secret_access_key is not set")',
        "cert.pem": "-----BEGIN CERTIFICATE-----\nMIIEvQIBADANBgkqhkiG9w0B",
        "shop.csv": f"ck_{'0' * 40}\nbatch_ck_1",
        "page.md": "-----BEGIN PRIVATE KEY-----\n...\n",
        "big.bin": KEY + "x" * 1024 * 1024,
    }
    assert found(tmp_path, files) == []
