"""A bucket that takes uploads and forgets them: `PutObject`, multipart uploads, and `HEAD` of what came in.

It reads every body to its end into one buffer for each connection, and keeps only sizes. In a process of its own.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.bench.certificates import make_certificates
from tests.bench.origin import Door
from tests.real.ports import free_port, listens

_XML = '<?xml version="1.0"?><{0} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{1}</{0}>'


@contextlib.contextmanager
def upload_sink(base: Path, *, tls: bool) -> Iterator[Door]:
    """Run it on a free port of 127.0.0.1 for the length of the block.

    Raises:
        RuntimeError: it does not start.
    """
    certificates, port = make_certificates(base / "sinktls"), free_port()
    argv = [sys.executable, "-m", "tests.bench.sink", str(port)]
    server = subprocess.Popen([*argv, str(certificates.server), str(certificates.key)] if tls else argv)
    try:
        deadline = time.monotonic() + 20
        while not listens("127.0.0.1", port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the upload sink does not start")
            time.sleep(0.05)
        yield Door(f"http{'s' * tls}://127.0.0.1:{port}", certificates.env if tls else {})
    finally:
        server.terminate()
        server.wait(10)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: dict[str, tuple[int, str]] = {}  # noqa: RUF012 (size and etag; shared by all connections on purpose)
    uploads: dict[str, dict[int, int]] = {}  # noqa: RUF012
    numbers = itertools.count(1)
    lock = threading.Lock()

    def setup(self) -> None:
        super().setup()
        self.buffer = memoryview(bytearray(2**20))

    def do_HEAD(self) -> None:
        found = self.objects.get(urlsplit(self.path).path)
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, etag=found[1], size=found[0])

    def do_GET(self) -> None:
        self._answer(HTTPStatus.NOT_FOUND)

    def do_PUT(self) -> None:
        size, query = self._read_body(), self._query()
        path, etag = urlsplit(self.path).path, f'"{next(self.numbers)}"'
        with self.lock:
            if "partNumber" in query:
                self.uploads[query["uploadId"]][int(query["partNumber"])] = size
            else:
                self.objects[path] = size, etag
        self._answer(HTTPStatus.OK, etag=etag)

    def do_POST(self) -> None:
        self._read_body()
        query, path = self._query(), urlsplit(self.path).path
        with self.lock:
            if "uploads" in query:
                upload = f"upload{next(self.numbers)}"
                self.uploads[upload] = {}
                body = _XML.format("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
            else:
                size, etag = sum(self.uploads.pop(query["uploadId"]).values()), f'"{next(self.numbers)}-1"'
                self.objects[path] = size, etag
                body = _XML.format("CompleteMultipartUploadResult", f"<ETag>{etag}</ETag>")
        self._answer(HTTPStatus.OK, body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing: one line for each request would be most of its work."""

    def _query(self) -> dict[str, str]:
        pairs = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        return {name: values[0] for name, values in pairs.items()}

    def _read_body(self) -> int:
        """Read it all; its size as the object's, without what the checksum's framing adds."""
        size = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            while chunk := int(self.rfile.readline().partition(b";")[0], 16):
                self._skip(chunk)
                size += chunk
                self.rfile.readline()
            self.rfile.readline()
        else:
            self._skip(size)
        return int(self.headers.get("X-Amz-Decoded-Content-Length") or size)

    def _skip(self, left: int) -> None:
        while left:
            count = self.rfile.readinto(self.buffer[:left])
            if not count:
                raise ConnectionError("the client went away")
            left -= count

    def _answer(self, status: HTTPStatus, body: bytes = b"", etag: str = "", size: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        if etag:
            self.send_header("ETag", etag)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Clients that go away are no error of ours."""


def main(port: str, *certificate: str) -> None:
    """Serve until terminated."""
    server = _Server(("127.0.0.1", int(port)), _Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
