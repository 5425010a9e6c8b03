"""A real HTTP server for tests of the lean reader, which misbehaves on demand."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from llm_prefetch.origins import ObjectInfo

DATA = bytes(range(256)) * 4
ITEM = ObjectInfo("dir/x", len(DATA), '"tag"')
WHERE = "s3://bucket/prefix"


@dataclass
class Request:
    """One request and the connection that it came on."""

    line: str
    headers: dict[str, str]
    connection: socket.socket
    on_connection: int
    """Number of the connection, from 0."""

    @property
    def range(self) -> tuple[int, int]:
        return tuple(int(number) for number in re.findall(r"\d+", self.headers["range"]))

    def send(self, status: str, headers: dict[str, object], body: bytes) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.connection.sendall(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)

    def send_range(self, *, body: bytes | None = None, **change: object) -> None:
        """The right answer, but for what the arguments say."""
        start, end = self.range
        headers = {
            "Content-Range": f"bytes {start}-{end}/{len(DATA)}",
            "Content-Length": end - start + 1,
            **{name.replace("_", "-"): value for name, value in change.items()},
        }
        body = DATA[start : end + 1] if body is None else body
        self.send("206 Partial Content", {k: v for k, v in headers.items() if v is not None}, body)

    def reset(self) -> None:
        """Close with a reset instead of an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionAbortedError


Answer = Callable[[Request], None]


def good(request: Request) -> None:
    request.send_range()


@dataclass
class Server:
    """Answers the first requests by `answers`, one each, and all others well."""

    answers: list[Answer] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    connections: int = 0
    tls: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}/bucket/"
            accepting = threading.Thread(target=self._accept, args=(listener,))
            accepting.start()
            try:
                yield self
            finally:
                self.ended.set()
                listener.shutdown(socket.SHUT_RDWR)
                accepting.join()

    def _accept(self, listener):
        others = []
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                others.append(threading.Thread(target=self._serve, args=(connection, self.connections)))
                self.connections += 1
                others[-1].start()
        for thread in others:
            thread.join()

    def _serve(self, connection, number):
        connection.settimeout(30)
        if self.tls:
            try:
                connection = self.tls.wrap_socket(connection, server_side=True)
            except OSError:  # the client did not trust it
                connection.close()
                return
        with connection, contextlib.suppress(OSError, ConnectionAbortedError):
            while head := self._head(connection):
                line, *rest = head.split("\r\n")
                headers = {name.lower(): value for name, value in (one.split(": ", 1) for one in rest if one)}
                request = Request(line, headers, connection, number)
                self.requests.append(request)
                answer = self.answers.pop(0) if self.answers else good
                answer(request)

    def _head(self, connection):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = connection.recv(1)
            if not piece:
                return ""
            head += piece
        return head.decode()
