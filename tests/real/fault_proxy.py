"""A proxy between a client and a real origin that does what networks and services do on a bad day.

A rule says which requests it is for and what happens to them, and counts how often it did: a test that does not look
at `Rule.hits` proves nothing. Everything else passes through unchanged. What can happen is in `faults`.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_POLL_SECONDS = 0.05
_LIST = re.compile(r"\b(list-type=2|comp=list)\b")
"""In the query of S3 and what speaks like it, and of Azure."""
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@contextlib.contextmanager
def fault_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """Run a proxy in this process, in front of the server at `endpoint` (`http://host:port`)."""
    proxy = FaultProxy(endpoint)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with _Server(("127.0.0.1", 0), handler) as server:
        proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,))
        serving.start()
        try:
            yield proxy
        finally:
            proxy.ended.set()
            server.shutdown()
            serving.join()
            server.hang_up()


@dataclass(frozen=True)
class Request:
    """One request that came in."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    at: float = field(default_factory=time.monotonic)
    """When it came."""

    @property
    def path(self) -> str:
        """The path, not escaped."""
        return unquote(urlsplit(self.target).path)

    @property
    def range(self) -> str:
        """The range that it asks for."""
        return next((value for name, value in self.headers.items() if name.lower() == "range"), "")

    def with_range(self, wanted: str) -> Request:
        """The same, for another range."""
        headers = {name: value for name, value in self.headers.items() if name.lower() != "range"}
        return replace(self, headers={**headers, "Range": wanted})

    @property
    def lists(self) -> bool:
        """Whether it asks for a page of a listing."""
        return _LIST.search(urlsplit(self.target).query) is not None


@dataclass(frozen=True)
class Answer:
    """One answer, of the origin or instead of it."""

    status: int
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Exchange:
    """One request that a fault is to happen to, and what the fault may do with it."""

    request: Request
    handler: _Handler

    def forward(self) -> Answer:
        """What the origin answers."""
        return self.handler.forward(self.request)

    def send(self, answer: Answer, *, length: int | None = None) -> None:
        """Send an answer; `length` is what it says to be long, if that is not true."""
        self.handler.send(answer, self.request.method, length)

    def end(self) -> None:
        """Close the connection as if nothing were left to say."""
        self.handler.close_connection = True

    def reset(self) -> None:
        """Drop the connection as a host does that has forgotten it."""
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.handler.forget()
        self.end()

    def hang(self, seconds: float | None = None) -> bool:
        """Say nothing for so long, or for ever; whether the client is still there."""
        left = seconds
        while not self.handler.proxy.ended.is_set() and (left is None or left > 0):
            if self.handler.is_left():
                return False
            self.handler.proxy.ended.wait(_POLL_SECONDS if left is None else min(left, _POLL_SECONDS))
            left = None if left is None else left - _POLL_SECONDS
        return not self.handler.proxy.ended.is_set()


Fault = Callable[[Exchange], None]


@dataclass
class Rule:
    """A fault and the requests that it happens to."""

    fault: Fault
    matches: Callable[[Request], bool]
    skip: int
    times: int | None
    hits: int = 0
    """How often it happened."""
    _seen: int = 0


@dataclass
class FaultProxy:
    """A running proxy: rules in the order in which they were made, the first that fits is taken."""

    origin: str
    endpoint: str = ""
    page_objects: int = 0
    """Most objects on one page of a listing, for an origin that would give all on one."""
    requests: list[Request] = field(default_factory=list)
    """Everything that came in."""
    ended: threading.Event = field(default_factory=threading.Event)
    _rules: list[Rule] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def inject(
        self,
        fault: Fault,
        path: str = "",
        *,
        skip: int = 0,
        times: int | None = 1,
        method: str = "GET",
        ranges: bool | None = None,
        lists: bool = False,
    ) -> Rule:
        """Let `fault` happen.

        Args:
            fault: What happens.
            path: A regular expression that is searched in the path, not escaped.
            skip: So many fitting requests pass first.
            times: How often it happens; `None` is for ever.
            method: Of the request.
            ranges: Only requests with a range, or only those without.
            lists: Only requests for a page of a listing; otherwise none of these.
        """
        pattern = re.compile(path)

        def matches(request: Request) -> bool:
            return (
                request.method == method
                and pattern.search(request.path) is not None
                and ranges in (None, bool(request.range))
                and request.lists == lists
            )

        rule = Rule(fault, matches, skip, times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def mend(self) -> None:
        """From now on everything passes."""
        with self._lock:
            self._rules.clear()

    def fault_for(self, request: Request) -> Fault | None:
        """What is to happen to a request; counted as having happened."""
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.matches(request):
                    rule._seen += 1
                    if rule._seen > rule.skip and rule.times != rule.hits:
                        rule.hits += 1
                        return rule.fault
        return None


class _Server(ThreadingHTTPServer):
    """Knows its connections, to end them with itself: clients keep theirs open."""

    daemon_threads = False

    def __init__(self, *arguments: object) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(*arguments)  # type: ignore[arg-type]

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, address = super().get_request()
        self.open.add(connection)
        return connection, address

    def shutdown_request(self, request: object) -> None:
        self.open.discard(request)
        super().shutdown_request(request)  # type: ignore[arg-type]

    def hang_up(self) -> None:
        """Let every thread that waits for a request find the end."""
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """A client that left is what faults lead to."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 0
    proxy: FaultProxy

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        if request.lists and self.proxy.page_objects:
            request = replace(request, target=f"{request.target}&max-keys={self.proxy.page_objects}")
        fault = self.proxy.fault_for(request)
        exchange = Exchange(request, self)
        try:
            if fault is None:
                exchange.send(exchange.forward())
            else:
                fault(exchange)
        except OSError:
            self.close_connection = True  # the client has left

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 (the base class looks for these names)

    def forward(self, request: Request) -> Answer:
        at = urlsplit(self.proxy.origin)
        upstream = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in ("host", "connection")
        }
        try:
            upstream.request(request.method, request.target, request.body or None, headers)
            response = upstream.getresponse()
            given = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP}
            if request.method == "HEAD":
                given["Content-Length"] = response.headers.get("Content-Length", "0")
            return Answer(response.status, response.reason, given, response.read())
        finally:
            upstream.close()

    def send(self, answer: Answer, method: str, length: int | None) -> None:
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if "Content-Length" not in answer.headers:
            lines.append(f"Content-Length: {len(answer.body) if length is None else length}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self.wfile.write(head + (b"" if method == "HEAD" else answer.body))

    def is_left(self) -> bool:
        """Whether the client has closed the connection."""
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def forget(self) -> None:
        """Close at once and without a farewell."""
        self.rfile.close()
        self.wfile.close()
        self.connection.close()
        self.rfile, self.wfile = io.BytesIO(), io.BytesIO()  # the base class closes them once more

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Say nothing: `FaultProxy.requests` records it."""
