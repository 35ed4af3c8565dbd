"""A real S3 server on loopback, moto's, in which a test can put faults."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

Fault = Callable[[str, str], int | float | None]
"""Given method and path of a request: a status to answer with, seconds to be silent
for, or None to let the request through."""


@dataclass
class Server:
    """What a test sees of the server."""

    endpoint: str
    fault: Fault | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Methods and paths, in the order in which they came."""
    app: Any = None
    _one: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        """WSGI; one request at a time, so that what moto looks at and then does is one
        step. As in S3, an object that has not come in whole, since its sender was
        killed, is not there."""
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"]
        if not is_whole(environ):
            start("400 Incomplete Body", [])
            return []
        self.requests.append((method, path))
        answer = None if self.fault is None else self.fault(method, path)
        if isinstance(answer, int):
            start(f"{answer} Fault", [("Content-Type", "application/xml")])
            return [] if method == "HEAD" else [error_body(answer)]
        if answer is not None:
            time.sleep(answer)
        with self._one:
            return list(self.app(environ, start))


def is_whole(environ: dict[str, Any]) -> bool:
    """Read the body of a request; whether all of it has come."""
    size = int(environ.get("CONTENT_LENGTH") or 0)
    if not size:
        return True
    body = b""
    with suppress(ConnectionError):
        body = environ["wsgi.input"].read(size)
    environ["wsgi.input"] = io.BytesIO(body)
    return len(body) == size


def error_body(status: int) -> bytes:
    """What S3 says of an error."""
    code = "AccessDenied" if status == 403 else "ServiceUnavailable"
    return f"<Error><Code>{code}</Code><Message>put in</Message></Error>".encode()


@contextmanager
def running() -> Iterator[Server]:
    """A server of its own, empty."""
    moto = pytest.importorskip("moto.server", reason="needs moto[server]")
    pytest.importorskip("s3fs", reason="needs s3fs")
    from moto.backends import get_backend
    from werkzeug.serving import WSGIRequestHandler, make_server

    get_backend("s3").reset()
    server = Server("")
    server.app = moto.DomainDispatcherApplication(moto.create_backend_app)

    class Quiet(WSGIRequestHandler):
        def log(self, *words: Any) -> None:
            """Write no line for each request."""

    http = make_server("127.0.0.1", 0, server, threaded=True, request_handler=Quiet)
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
