"""A server of the user's own, in the standard library only, and replicas that run it as a command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from harness.replicas.replicas import Replica, running_replica

#: Listens at the unix socket or the port, and does what the path says.
SERVER = """
    import http.server, json, os, pathlib, signal, socketserver, subprocess, sys, threading, time

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

    class UnixServer(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        server_name, server_port = "unix", 0

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def address_string(self):
            return "client"

        def log_message(self, text, *args):
            pass

        def answer(self, status, data, **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def do_GET(self):
            length = int(self.headers.get("content-length", 0))
            body = self.rfile.read(length)
            if self.headers.get("transfer-encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            path = self.path.partition("?")[0].removeprefix("/v1")
            if path == "/health":
                ready = not os.path.exists("unready")
                self.answer(200 if ready else 503, b"")
            elif path == "/exit":
                os._exit(3)
            elif path == "/kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif path == "/hang-up":
                self.close_connection = True
            elif path == "/cut":
                self.send_response(200)
                self.send_header("content-length", "100")
                self.end_headers()
                self.wfile.write(b"begun")
                self.close_connection = True
            elif path == "/allocate":
                self.server.hoard = bytes([1]) * (300 * 1024 * 1024)
                time.sleep(600)
            elif path == "/sleep":
                print("begun", flush=True)
                time.sleep(float(body or b"600"))
                self.answer(200, b"slept")
            elif path == "/wait":
                print("begun", flush=True)
                while not os.path.exists(body):
                    time.sleep(0.01)
                self.answer(200, b"waited")
            elif path == "/until-closed":
                self.send_response(200)
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(b"until the end")
                self.close_connection = True
            elif path == "/stream":
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for number in range(3):
                    data = b"data: %d\\n\\n" % number
                    self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(data), data))
                    self.wfile.flush()
                self.wfile.write(b"0\\r\\n\\r\\n")
            elif path == "/redirect":
                self.answer(307, b"", location="/elsewhere?x=1")
            elif path == "/early":
                self.wfile.write(b"HTTP/1.1 103 Early Hints\\r\\nlink: </style.css>\\r\\n\\r\\n")
                self.answer(200, b"after hints")
            elif path == "/nothing":
                self.send_response(204)
                self.end_headers()
            elif path == "/headers":
                self.answer(200, b"many", **{f"x-{number}": "1" for number in range(int(body))})
            elif path == "/spawn":
                child = subprocess.Popen(["sleep", "600"])
                self.answer(200, str(child.pid).encode())
            else:
                told = {"method": self.command, "path": self.path, "body": body.decode("latin-1"), "pid": os.getpid(),
                        "headers": {name.lower(): value for name, value in self.headers.items()},
                        "endpoint": os.environ["CORTEX_ENDPOINT"], "cwd": os.getcwd()}
                self.answer(200, json.dumps(told).encode(), content_type="application/json", x_own="1")

        do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = do_GET

    print("arguments", sys.argv[1:], flush=True)
    if sys.argv[1].startswith("/"):
        server = UnixServer(sys.argv[1], Answers)
    else:
        server = Server(("127.0.0.1", int(sys.argv[1])), Answers)
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.serve_forever()
"""
ON_PORT = (sys.executable, "handler.py", "$PORT")
ON_SOCKET = (sys.executable, "handler.py", "$CORTEX_SOCKET")


@contextlib.contextmanager
def running_command(*command: str, source: str = SERVER, **fields: Any) -> Iterator[Replica]:
    """Run a replica of a command in a project whose `handler.py` has `source`."""
    settings = {"type": "command", "path": "", "endpoint": "/own", "max_concurrency": 100} | fields
    with running_replica(source, command=command or ON_PORT, **settings) as replica:
        yield replica
