"""A web server on loopback whose answers are planned, faults among them."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

Answer = Callable[["Visit"], None]


class Visit(BaseHTTPRequestHandler):
    """One request; what answers it stands in the server's plan, else a file does."""

    server: WebServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer by the plan, or with a file or a folder's page."""
        path = self.path.partition("?")[0]
        self.server.seen[path] += 1
        self.server.authorizations.add(self.headers.get("Authorization"))
        self.close_connection = True
        try:
            (self.server.plan.get(path) or file_of)(self)
        except (BrokenPipeError, ConnectionResetError):
            self.server.hung_up.set()

    do_HEAD = do_GET  # noqa: N815

    def send(
        self, body: bytes, status: int = 200, length: int | None = None, **more: str
    ) -> None:
        """An answer; `length` is what it says of its length, if that is a lie."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Connection", "close")
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class WebServer(ThreadingHTTPServer):
    """Files of a folder, and answers that are planned by path."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Visit)
        self.root = root
        self.plan = dict[str, Answer]()
        self.seen: Counter[str] = Counter()
        """Requests by path."""
        self.authorizations: set[str | None] = set()
        self.hung_up = Event()
        self.over = Event()
        self.address = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.address}/"


def file_of(visit: Visit) -> None:
    """A file, or the part that was asked for."""
    from urllib.parse import unquote

    path = visit.server.root / unquote(visit.path.partition("?")[0]).lstrip("/")
    if not path.is_file():
        return visit.send(b"", 404)
    body = path.read_bytes()
    byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", visit.headers.get("Range", ""))
    if byte_range is None:
        return visit.send(body)
    first = int(byte_range[1])
    last = min(int(byte_range[2]), len(body) - 1)
    content_range = f"bytes {first}-{last}/{len(body)}"
    return visit.send(body[first : last + 1], 206, Content_Range=content_range)


def unavailable(visit: Visit) -> None:
    """503."""
    visit.send(b"later", 503)


def truncated(visit: Visit) -> None:
    """Half of what the length says."""
    visit.send(b"\x89PNG" * 10, length=400)


def endless(visit: Visit) -> None:
    """A body without an end, of which the length says nothing."""
    visit.send_response(200)
    visit.end_headers()
    while not visit.server.over.is_set():
        visit.wfile.write(b"\0" * 65536)


def redirected(to: str) -> Answer:
    """Sends elsewhere."""
    return lambda visit: visit.send(b"", 302, Location=to)


def guarded(user: str, password: str) -> Answer:
    """The file for whoever has the password."""
    credentials = base64.b64encode(f"{user}:{password}".encode()).decode()

    def answer(visit: Visit) -> None:
        if visit.headers.get("Authorization") == f"Basic {credentials}":
            file_of(visit)
        else:
            visit.send(b"", 401)

    return answer


@contextmanager
def serving(root: Path) -> Iterator[WebServer]:
    """The server, for as long as the block lasts."""
    with WebServer(root) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
