"""A fake model agent with scripted replies, for sequences that a real agent produces only by chance."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cortex.models.protocol import CatalogueUpdate, Fetch, Fetched, Using, Watch, read_request, write
from cortex.models.spec import DEFAULT_MODEL, Catalogue, Model, ModelProblem, Version


class ScriptedAgent:
    """Implements the protocol of model agents on a Unix socket, and records requests."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "agent.sock")
        self.using: dict[int, frozenset[str]] = {}
        self.watches: list[Watch] = []
        self._folder = folder
        self._numbers = itertools.count()
        self._news = CatalogueUpdate(None, None, None)
        self._clients: dict[int, socket.socket] = {}
        self._contents: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None

    def start(self) -> None:
        Path(self.socket).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.socket)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        if self._listener is None:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        for client in list(self._clients.values()):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def content(self, digest: str, text: str) -> Version:
        """Write a content with one file, `model.txt`; the caller replaces `number` and other fields."""
        folder = self._folder / "content" / digest
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.txt").write_text(text)
        self._contents[digest] = folder
        return Version("1", digest, len(text), time.time(), str(folder))

    def forget(self, digest: str) -> None:
        shutil.rmtree(self._contents.pop(digest))

    def announce(
        self, confirmed: Catalogue | None, candidate: Catalogue | None = None, error: str | None = None
    ) -> None:
        with self._lock:
            self._news = CatalogueUpdate(self._write(confirmed), self._write(candidate), error)
            for client in self._clients.values():
                with contextlib.suppress(OSError):
                    client.sendall(write(self._news))

    def _write(self, catalogue: Catalogue | None) -> str | None:
        if catalogue is None:
            return None
        file = self._folder / f"news-{next(self._numbers)}.json"
        file.write_bytes(catalogue.to_json())
        return str(file)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                client = listener.accept()[0]
                threading.Thread(target=self._serve, args=(number, client), daemon=True).start()

    def _serve(self, number: int, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, client.makefile("rb") as lines:
            for line in lines:
                request = read_request(line)
                if isinstance(request, Watch):
                    with self._lock:
                        self.watches.append(request)
                        self._clients[number] = client
                        client.sendall(write(self._news))
                elif isinstance(request, Using):
                    self.using[number] = request.digests
                elif isinstance(request, Fetch):
                    client.sendall(write(Fetched(request.id, str(self._contents[request.digest]))))
        with self._lock:  # `announce` may be sending to all clients
            self._clients.pop(number, None)
        self.using.pop(number, None)


def catalogue(*versions: Version, name: str = DEFAULT_MODEL, problems: tuple[ModelProblem, ...] = ()) -> Catalogue:
    """Return a catalogue of one model."""
    ordered = tuple(sorted(versions, key=lambda version: version.order))
    return Catalogue((Model(name, ordered),) if ordered else (), problems)


@contextlib.contextmanager
def scripted_agent(folder: Path) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(folder)
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()
