"""An S3 origin in this process that counts: just enough of the API for obstore to list, stat and read, and no more."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"


@dataclass
class CountingOrigin:
    """Objects by key, and every range that was asked for."""

    objects: dict[str, bytes] = field(default_factory=dict)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """Key, first byte and length of each range, in order."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _server: ThreadingHTTPServer = field(init=False)

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"origin": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def put(self, prefix: str, files: Mapping[str, bytes]) -> str:
        self.objects |= {f"{prefix}/{path}": body for path, body in files.items()}
        return f"s3://{BUCKET}/{prefix}"

    def asked(self, key: str, start: int, length: int) -> None:
        with self._lock:
            self.ranges.append((key, start, length))

    def take_ranges(self) -> list[tuple[str, int, int]]:
        """What was asked for since the last call."""
        with self._lock:
            taken, self.ranges = self.ranges, []
        return taken


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    origin: CountingOrigin

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path.strip("/") == BUCKET:
            query = parse_qs(url.query)
            self._send(200, self._listing(query.get("prefix", [""])[0]), {"Content-Type": "application/xml"})
        else:
            self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        body = self.origin.objects.get(key)
        if body is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", {}, with_body=with_body)
            return
        headers = {"ETag": _etag(body), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        status, part = 200, body
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last), len(body) - 1)
            self.origin.asked(key, start, end + 1 - start)
            status, part = 206, body[start : end + 1]
            headers["Content-Range"] = f"bytes {start}-{end}/{len(body)}"
        self._send(status, part, headers, with_body=with_body)

    def _listing(self, prefix: str) -> bytes:
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(body)}</Size><ETag>{escape(_etag(body))}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, body in sorted(self.origin.objects.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], *, with_body: bool = True) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client was killed, which is what this is for

    def handle(self) -> None:
        with suppress(ConnectionResetError):
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


def _etag(body: bytes) -> str:
    return f'"{md5(body).hexdigest()}"'
