"""Certificates that the client accepts, and its errors for others."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cortex.client.environments import Environments
from cortex.client.transport import SYSTEM_TRUST, Transport, Trust
from cortex.errors import InputError, OperatorUnavailableError
from cortex.home import Home
from cortex.tls import fingerprint_of
from harness.servers.certificates import write_pair

pytestmark = pytest.mark.processes


class _Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'"fine"')

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server(pair: tuple[Path, Path] | None) -> Iterator[int]:
    """Serve on a port, over TLS with a certificate."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    made.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that disconnect are expected
    if pair:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pair)
        made.socket = context.wrap_socket(made.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made.server_port
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_accepts_a_certificate_in_the_ca_file_for_its_names(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "localhost")
    with server(pair) as port:
        trust = Trust(str(pair[0]))
        assert Transport(f"https://localhost:{port}", trust=trust).call("GET", "/") == "fine"
        with pytest.raises(OperatorUnavailableError, match="use an address that the certificate is valid for"):
            Transport(f"https://127.0.0.1:{port}", trust=trust).call("GET", "/")
        with pytest.raises(OperatorUnavailableError, match="self-signed certificate.*--ca FILE"):
            Transport(f"https://localhost:{port}", trust=SYSTEM_TRUST).call("GET", "/")


def test_reports_an_expired_certificate(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "localhost", days=-1)
    with server(pair) as port, pytest.raises(OperatorUnavailableError, match="has expired.*renew it"):
        Transport(f"https://localhost:{port}", trust=Trust(str(pair[0]))).call("GET", "/")


def test_accepts_only_a_pinned_certificate(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "elsewhere", days=-1)
    print_of = fingerprint_of(ssl.PEM_cert_to_DER_cert(pair[0].read_text()))
    with server(pair) as port:
        url = f"https://cortex.example.com:{port}"  # no resolver here knows this name
        assert Transport(url, trust=Trust(pins=lambda: [print_of], address="127.0.0.1")).call("GET", "/") == "fine"
        with pytest.raises(OperatorUnavailableError, match="not that of this machine's operator"):
            Transport(url, trust=Trust(pins=lambda: ["0" * 64], address="127.0.0.1")).call("GET", "/")


def test_reports_a_wrong_scheme(tmp_path: Path) -> None:
    with server(None) as port, pytest.raises(OperatorUnavailableError, match="its address begins with http://"):
        Transport(f"https://localhost:{port}").call("GET", "/")
    with server(write_pair(tmp_path, "a")) as port, pytest.raises(OperatorUnavailableError, match="https://"):
        Transport(f"http://localhost:{port}").call("GET", "/")


def test_an_environment_stores_its_certificates(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "localhost")
    environments = Environments(tmp_path / "cli.json", Home(tmp_path / "home"))
    with server(pair) as port:
        environments.configure("lab", f"https://localhost:{port}", "token", pair[0])
        assert environments.get("lab").connect().call("GET", "/") == "fine"
        assert [each.name for each in environments.known()] == ["local", "lab"]
    for file, said in ((tmp_path / "none.pem", "can't be read"), (pair[1], "does not contain certificates")):
        with pytest.raises(InputError, match=said):
            environments.configure("bad", "https://localhost:1", "token", file)
    with pytest.raises(InputError, match="begins with https://"):
        environments.configure("bad", "http://localhost:1", "token", pair[0])
    pair[0].unlink()
    with pytest.raises(InputError, match="does not exist; choose another file"):
        environments.get("lab").connect()
