"""A proxy in front of an object server that lies about some requests."""

from __future__ import annotations

import http.client
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REFUSALS = {"404": "NoSuchKey", "409": "OperationAborted", "503": "SlowDown"}
"""Error codes of S3 for each status."""

_HOPS = ("connection", "keep-alive", "transfer-encoding", "content-length")
_ANSWER_SECONDS_MAX = 60
_LINE_BYTES_MAX = 1 << 16


@dataclass(frozen=True)
class Request:
    """A request to the proxy.

    Attributes:
        method: HTTP method.
        target: Path and query.
        body: Body of the request.
    """

    method: str
    target: str
    body: bytes = field(repr=False)

    @property
    def is_listing(self) -> bool:
        """Whether it lists objects."""
        return self.method == "GET" and "list-type" in parse_qs(urlsplit(self.target).query)


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        status: Status code.
        headers: All headers except those of the connection.
        body: Content.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class Lie:
    """A fault of some requests, or of their answers.

    Attributes:
        kind: ``garbled`` for an invalid status line, ``flipped`` for a flipped bit in the body,
            ``cut`` for a truncated body, ``dropped`` for a connection that closes before the
            request is passed on, ``unanswered`` for one that closes after that, ``stale`` for the
            first answer to the same request, or one of `REFUSALS` instead of passing it on.
        skip: Number of matching requests that pass first.
        count: Number of matching requests to lie about.
        is_for: Whether a request matches.
        then: Called before each lie.
    """

    kind: str
    skip: int = 0
    count: int = 1
    is_for: Callable[[Request], bool] = lambda _: True
    then: Callable[[], object] = lambda: None


class LyingServer:
    """A proxy server whose answers may be lies.

    Attributes:
        endpoint: Address of the proxy.
        seen: The requests since the last lie was set, in order.
        told: Number of them that were lied about.
    """

    def __init__(self, behind: str) -> None:
        self._behind = behind.removeprefix("http://")
        self._lie: Lie | None = None
        self._matched = 0
        self._first: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self.seen: list[Request] = []
        self.told = 0
        self.endpoint = ""

    def tell(self, lie: Lie | None) -> None:
        """Sets the lie for the next requests, or none."""
        with self._lock:
            self._lie, self._matched, self.told, self.seen = lie, 0, 0, []

    def kind_for(self, request: Request) -> str | None:
        """Returns the kind of lie for a request, if any."""
        with self._lock:
            self.seen.append(request)
            lie = self._lie
            if lie is None or not lie.is_for(request):
                return None
            self._matched += 1
            if not lie.skip < self._matched <= lie.skip + lie.count:
                return None
            self.told += 1
        lie.then()
        return lie.kind

    def pass_on(self, request: Request, headers: dict[str, str]) -> Answer:
        """Returns the server's own answer."""
        connection = http.client.HTTPConnection(self._behind, timeout=_ANSWER_SECONDS_MAX)
        try:
            connection.putrequest(
                request.method, request.target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(request.body)
            found = connection.getresponse()
            body = found.read()
            answer = Answer(found.status, found.getheaders(), body)
        finally:
            connection.close()
        with self._lock:
            self._first.setdefault(f"{request.method} {request.target}", answer)
        return answer

    def first(self, request: Request) -> Answer | None:
        """Returns the first answer to the same request."""
        with self._lock:
            return self._first.get(f"{request.method} {request.target}")


def _flipped(answer: Answer) -> Answer:
    body = bytearray(answer.body)
    if body:
        body[len(body) // 2] ^= 1
    return Answer(answer.status, answer.headers, bytes(body))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    lying: LyingServer

    def handle_one_request(self) -> None:
        """Handles all HTTP methods by one function."""
        self.raw_requestline = self.rfile.readline(_LINE_BYTES_MAX)
        if self.raw_requestline and self.parse_request():
            self._answer()
        else:
            self.close_connection = True

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        request = Request(self.command, self.path, body)
        kind = self.lying.kind_for(request)
        if kind == "dropped":
            self.close_connection = True
            return
        if kind in REFUSALS:
            text = f"<Error><Code>{REFUSALS[kind]}</Code><Message>No.</Message></Error>"
            self._send(Answer(int(kind), [("Content-Type", "application/xml")], text.encode()))
            return
        answer = self.lying.first(request) if kind == "stale" else None
        answer = answer or self.lying.pass_on(request, dict(self.headers.items()))
        if kind in ("unanswered", "garbled", "cut"):
            self.close_connection = True
        if kind == "unanswered":
            return
        if kind == "garbled":
            self.wfile.write(b"HTTQ/1.\xff OK\r\n\r\n")
            return
        if kind == "flipped":
            answer = _flipped(answer)
        self._send(answer, len(answer.body) // 2 if kind == "cut" else None)

    def _send(self, answer: Answer, part: int | None = None) -> None:
        lines = [f"HTTP/1.1 {answer.status} Any"]
        is_head = self.command == "HEAD"
        for name, value in answer.headers:
            if name.lower() not in _HOPS or (is_head and name.lower() == "content-length"):
                lines.append(f"{name}: {value}")
        if not is_head:
            lines.append(f"Content-Length: {len(answer.body)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self.wfile.write(head + (b"" if is_head else answer.body[:part]))

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing."""


@contextmanager
def lying(behind: str) -> Iterator[LyingServer]:
    """Runs a proxy for the duration of the block.

    Args:
        behind: Endpoint of the server.
    """
    server = LyingServer(behind)
    handler = type("Handler", (_Handler,), {"lying": server})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        listener.daemon_threads = True
        server.endpoint = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
