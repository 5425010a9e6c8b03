"""A web server in a thread of this process, as much of one as an origin is asked of: files, ranges, tags, redirects.

What it serves and how is a `Web`; what it was asked is kept there, with the headers.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from llm_prefetch import manifest as manifests
from llm_prefetch.manifest import CHUNK_BYTES
from tests.samples import make_manifest


@dataclass
class Asked:
    path: str
    query: str
    headers: dict[str, str]
    sent: int = 0


@dataclass
class Web:
    """What a server serves, and how."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    """Paths, or their first folder, and where they are."""
    ranges: bool = True
    encoding: str = ""
    tag: str = '"{}"'
    modified: str | None = None
    login: str = ""
    query: str = ""
    """Only who asks with it is let in."""
    absent: int = 404
    page: bytes = b""
    """What is served where nothing is."""
    requests: list[Asked] = field(default_factory=list)

    def put(self, prefix: str, files: Mapping[str, bytes], *, published: bool = True) -> str:
        self.files.update({f"{prefix}/{path}": data for path, data in files.items()})
        if published:
            self.files[f"{prefix}/{manifests.PATH}"] = make_manifest(files, CHUNK_BYTES).to_json()
        return f"{self.url}{prefix}"


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        self.open.discard(request)
        super().close_request(request)

    def hang_up(self) -> None:
        """End the connections that clients keep open."""
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away amid an answer is none."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    web: Web

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        url, web = urlsplit(self.path), self.web
        path = unquote(url.path)
        self.asked = Asked(path, url.query, {name.lower(): value for name, value in self.headers.items()})
        web.requests.append(self.asked)
        folder = "/" + path.split("/")[1]
        if (there := web.moved.get(path) or web.moved.get(folder)) is not None:
            return self._send(302, Location=there.replace("PATH", url.path))
        if (web.login and self.headers.get("Authorization") != web.login) or web.query not in ("", url.query):
            return self._send(401)
        data = web.files.get(path)
        if data is None and web.page:
            return self._send(200, web.page, Content_Type="text/html; charset=utf-8")
        if data is None:
            return self._send(web.absent)
        return self._file(data)

    def _file(self, data: bytes) -> None:
        headers = {
            "ETag": self.web.tag.format(hash(data)),
            "Last-Modified": self.web.modified,
            "Content-Encoding": self.web.encoding,
        }
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.headers.get("If-Match") not in (None, headers["ETag"]):
            return self._send(412)
        if match is None or not self.web.ranges:
            return self._send(200, data, **headers)
        start, body = int(match[1]), data[int(match[1]) : int(match[2]) + 1]
        if not body:
            return self._send(416, b"<html>", Content_Range=f"bytes */{len(data)}", Content_Type="text/html")
        shown = f"bytes {start}-{start + len(body) - 1}/{len(data)}"
        return self._send(206, body, Content_Range=shown, **headers)

    def _send(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.asked.sent = len(body)
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            if value:
                self.send_header(name.replace("_", "-"), str(value))
        if not body:
            self.send_header("Content-Length", "0")
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def web_server(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    web = Web()
    with _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"web": web})) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        web.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()
            server.hang_up()
