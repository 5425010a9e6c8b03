"""A real S3 API on this machine: moto's server in a process of its own, which counts what it serves.

Moto keeps objects in memory and serves some tens of MB/s: right for what an API does, wrong for a benchmark.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tests.real import processes
from tests.real.ports import listens

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_REPOSITORY = Path(__file__).parents[2]
_LOG_PATH = "/_requests"  # no bucket may have an underscore in front
_PAGED = "paged-"
"""Buckets whose name begins so are listed by three objects a page."""
_BROKEN_PATH = "/_broken/"
_REGION = "us-east-1"


@contextlib.contextmanager
def s3_server(host: str = "127.0.0.1") -> Iterator[S3Server]:
    """Run an empty S3 server on a free port of `host`; pass `cluster.gateway_ip` for hosts to reach it.

    Raises:
        RuntimeError: it did not come up; the message shows its log.
    """
    with processes.scratch("s3") as area:
        port_file = area.path / "port"
        code = "import sys; from tests.real.s3 import _serve; _serve(*sys.argv[1:])"
        argv = [sys.executable, "-c", code, host, str(port_file)]

        def ready() -> bool:
            return port_file.exists() and listens(host, int(port_file.read_text() or 0))

        with processes.process(argv, area=area, name="s3", cwd=_REPOSITORY, ready=ready, grace=1.0):
            server = S3Server(f"http://{host}:{int(port_file.read_text())}")
            try:
                yield server
            finally:
                server.close()


@dataclass(frozen=True)
class Request:
    """One request that the server answered."""

    method: str
    path: str
    query: str
    range: str | None
    status: int
    sent: int
    """Bytes of the body that went out."""
    at: float
    """When the last of them did, in seconds of a clock that only goes on."""

    @property
    def bucket(self) -> str:
        """The bucket it asked for; empty for a request about the service."""
        return self.path.lstrip("/").partition("/")[0]

    @property
    def key(self) -> str:
        """The object it asked for; empty for a request about a bucket."""
        return unquote(self.path.lstrip("/").partition("/")[2])

    @property
    def kind(self) -> str:
        """`read`, `head`, `list`, `write`, `delete`: what it did to an object, or to a bucket's listing."""
        if self.method == "GET":
            return "read" if self.key else "list"
        return {"HEAD": "head", "PUT": "write", "POST": "write", "DELETE": "delete"}.get(
            self.method, self.method
        )


@dataclass(frozen=True)
class S3Server:
    """A running server and a client of it."""

    endpoint: str

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment for boto3, obstore, s3fs and our package to use this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": _REGION,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ALLOW_HTTP": "true",  # obstore refuses plain HTTP without
            "AWS_EC2_METADATA_DISABLED": "true",  # no client should look for a role outside of this machine
        }

    @functools.cached_property
    def client(self) -> Any:
        """A boto3 client for what the methods below do not cover."""
        import boto3  # slow to import, and not needed by those who only start the server
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name=_REGION,
            config=Config(s3={"addressing_style": "path"}),
        )

    def create_bucket(self, name: str) -> str:
        """Make a bucket and return its name."""
        self.client.create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def get(self, bucket: str, key: str) -> bytes:
        """Read an object. Raises botocore's `NoSuchKey` where there is none."""
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object, or nothing where there is none."""
        self.client.delete_object(Bucket=bucket, Key=key)

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys below `prefix`, sorted."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def requests(self, kind: str | None = None) -> list[Request]:
        """What the server answered since its start or the last `forget`, this object's own calls among them."""
        with urllib.request.urlopen(self.endpoint + _LOG_PATH, timeout=30) as answer:
            served = [Request(**entry) for entry in json.load(answer)]
        return [request for request in served if kind in (None, request.kind)]

    def bytes_read(self) -> int:
        """Bytes of objects sent since the start or the last `forget`."""
        return sum(request.sent for request in self.requests("read"))

    def fail(self, bucket: str) -> None:
        """Answer every request about `bucket` with 503 until `mend`."""
        self._call("PUT", _BROKEN_PATH + bucket)

    def mend(self, bucket: str) -> None:
        """Serve `bucket` again."""
        self._call("DELETE", _BROKEN_PATH + bucket)

    def close(self) -> None:
        """Close the connections of `client`."""
        if "client" in self.__dict__:
            self.client.close()

    def forget(self) -> None:
        """Start counting from nothing."""
        self._call("DELETE", _LOG_PATH)

    def _call(self, method: str, path: str) -> None:
        request = urllib.request.Request(self.endpoint + path, method=method)
        urllib.request.urlopen(request, timeout=30).close()


def _serve(
    host: str, port_file: str, guard: Callable[[WSGIApplication], WSGIApplication] = lambda app: app
) -> None:
    """Serve for ever behind `guard`; the child process's whole work."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections open, as S3 does

        def log_request(self, *_: object) -> None:
            """Say nothing: `Request` records it."""

    app = _Counting(guard(DomainDispatcherApplication(create_backend_app)))
    server = make_server(host, 0, app, threaded=True, request_handler=Handler)
    Path(port_file).write_text(str(server.server_port))
    server.serve_forever()


@dataclass
class _Counting:
    """WSGI middleware that remembers each request, gives the list at `_LOG_PATH`, and fails for broken buckets."""

    app: WSGIApplication
    served: list[Request] = field(default_factory=list)  # appending is atomic: no lock
    broken: set[str] = field(default_factory=set)
    begun: int = 0
    """Requests that are not answered to their end."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _LOG_PATH:
            self._wait_for_the_last()
            body = json.dumps([asdict(request) for request in self.served]).encode()
            if environ["REQUEST_METHOD"] == "DELETE":
                self.served.clear()
            start_response(
                "200 OK", [("Content-Length", str(len(body))), ("Content-Type", "application/json")]
            )
            return [body]
        if environ["PATH_INFO"].startswith(_BROKEN_PATH):
            bucket = environ["PATH_INFO"].removeprefix(_BROKEN_PATH)
            (self.broken.add if environ["REQUEST_METHOD"] == "PUT" else self.broken.discard)(bucket)
            start_response("204 No Content", [])
            return []
        return self._counted(environ, start_response)

    def _wait_for_the_last(self) -> None:
        """A client may have its answer before that was written down."""
        deadline = time.monotonic() + 2
        while self.begun and time.monotonic() < deadline:
            time.sleep(0.01)

    def _counted(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        with self._lock:
            self.begun += 1
        try:
            yield from self._served(environ, start_response)
        finally:
            with self._lock:
                self.begun -= 1

    def _served(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        if environ["PATH_INFO"].startswith(f"/{_PAGED}") and "list-type=2" in environ["QUERY_STRING"]:
            for name in ("QUERY_STRING", "RAW_URI", "REQUEST_URI"):
                environ[name] = f"{environ.get(name, '')}&max-keys=3"
        status: list[str] = []

        def remember_status(line: str, *rest: Any) -> Any:
            status.append(line)
            return start_response(line, *rest)

        sent = 0
        broken = environ["PATH_INFO"].lstrip("/").partition("/")[0] in self.broken
        body = (_slow_down if broken else self.app)(environ, remember_status)
        try:
            for part in body:
                sent += len(part)
                yield part
        finally:
            if hasattr(body, "close"):
                body.close()
            path, _, query = str(environ.get("RAW_URI") or environ["PATH_INFO"]).partition("?")
            code = int(status[-1].split()[0]) if status else 0
            method = environ["REQUEST_METHOD"]
            at = time.monotonic()
            self.served.append(Request(method, path, query, environ.get("HTTP_RANGE"), code, sent, at))


def _slow_down(_environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
    """What S3 answers when it has too much to do."""
    body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    start_response("503 Slow Down", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
    return [body]
