"""What stands for Google Cloud Storage: its XML API, which obstore speaks, on top of moto's S3 server.

The XML API of Google answers the same requests as S3 (`GET /bucket?list-type=2`, `GET`, `HEAD` and `PUT` of objects,
uploads in parts), so moto's objects, listings, etags and errors serve. What is Google's own is done here, for real:
every request about a bucket that is not public carries either a bearer token, whose signature by the service
account's key is verified, or a `GOOG4-RSA-SHA256` signature in its query, which is verified too.

A metadata server, as nodes and workload identity have it, is here too, as far as google-auth asks it for tokens.

So is OAuth's token endpoint, which google-auth asks, where object_store signs a service account's tokens itself. The
JSON API, which gcsfs speaks, is `tests.real.gcs_json`, for the same objects and behind the same credentials.

Not covered: generations, the consistency and the limits of the real service, and whatever else Google does otherwise
than S3.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote

from google_crc32c import value as crc32c

from tests.real import gcs_json, processes
from tests.real.gcs_json import JsonApi
from tests.real.ports import listens
from tests.real.s3 import S3Server, _serve

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_REPOSITORY = Path(__file__).parents[2]
_EMAIL = "tests@llm-prefetch.iam.gserviceaccount.com"
_AMAZON = (
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
"""What moto, which verifies nothing, takes for an owner's request."""
_TOKENS = "/_token"  # no bucket may have an underscore in front
_LYING = "lying-"
"""Buckets whose name begins so state another checksum than their objects have."""
_PUBLIC = "public-"
"""Buckets whose name begins so are read without credentials."""


@contextlib.contextmanager
def gcs_server(host: str = "127.0.0.1") -> Iterator[GCSServer]:
    """Run an empty server on a free port of `host`.

    Raises:
        RuntimeError: it did not come up; the message shows its log.
    """
    with processes.scratch("gcs") as area:
        port_file, key_file = area.path / "port", area.path / "public.pem"
        private, public = _key_pair()
        key_file.write_text(public)
        code = "import sys; from tests.real.gcs import _serve_gcs; _serve_gcs(*sys.argv[1:])"
        argv = [sys.executable, "-c", code, host, port_file, key_file, _token(private)]

        def ready() -> bool:
            return port_file.exists() and listens(host, int(port_file.read_text() or 0))

        with processes.process(argv, area=area, name="gcs", cwd=_REPOSITORY, ready=ready, grace=1.0):
            server = GCSServer(f"http://{host}:{int(port_file.read_text())}", private)
            try:
                yield server
            finally:
                server.close()


@dataclass(frozen=True)
class GCSServer(S3Server):
    """A running server; its methods go in by moto's own door."""

    private_key: str = field(repr=False, default="")

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment for obstore and our package to use this server."""
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": self.service_account()}

    def service_account(self, **changes: Any) -> str:
        """The key file of a service account that may do everything."""
        key = {
            "type": "service_account",
            "client_email": _EMAIL,
            "private_key": self.private_key,
            "private_key_id": "1",
            "gcs_base_url": self.endpoint,
            "token_uri": f"{self.endpoint}{_TOKENS}",
        }
        return json.dumps({**key, **changes})

    @property
    def node_env(self) -> dict[str, str]:
        """The same as `env` on a node of Google's, where a metadata server gives out tokens."""
        host = self.endpoint.removeprefix("http://")
        return {"GOOGLE_BASE_URL": self.endpoint, "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host}

    def bearer_token(self) -> str:
        """A token that may do everything."""
        return _token(self.private_key)

    @staticmethod
    def other_key() -> str:
        """A private key that this server does not know."""
        return _key_pair()[0]


def _key_pair() -> tuple[str, str]:
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return private.decode(), public.decode()


def _token(private_key: str) -> str:
    from google.auth import crypt, jwt

    now = int(time.time())
    claims = {"iss": _EMAIL, "iat": now, "exp": now + 3600}
    return bytes(jwt.encode(crypt.RSASigner.from_string(private_key), claims)).decode()


def _serve_gcs(host: str, port_file: str, key_file: str, token: str) -> None:
    """Serve for ever; the child process's whole work."""
    public = Path(key_file).read_text()
    clients: dict[str, Any] = {}

    def connect(endpoint: str) -> Any:
        if endpoint not in clients:
            clients[endpoint] = S3Server(endpoint).client
        return clients[endpoint]

    _serve(host, port_file, lambda app: _Guard(app, public, token, JsonApi(connect)))


@dataclass
class _Guard:
    """WSGI middleware that asks for Google's credentials, and hides them from moto, which knows only Amazon's."""

    app: WSGIApplication
    public_key: str
    token: str
    json_api: JsonApi

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_METADATA_FLAVOR") == "Google":
            return self._metadata(environ, start_response)
        if environ["PATH_INFO"] == _TOKENS:
            return self._exchange(environ, start_response)
        authorization = environ.get("HTTP_AUTHORIZATION", "")
        query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
        if authorization.startswith("AWS4-HMAC-SHA256"):  # the tests' own calls
            return self.app(environ, start_response)
        by_json = gcs_json.PATH.match(environ["PATH_INFO"])
        bucket = environ["PATH_INFO"].partition("/b/" if by_json else "/")[2]
        public = bucket.startswith(_PUBLIC) and environ["REQUEST_METHOD"] in ("GET", "HEAD")
        if authorization:
            code = "" if self._knows_token(authorization) else "401 Unauthorized"
        elif "X-Goog-Signature" in query:
            code = "" if self._knows_signature(environ, query) else "403 Forbidden"
        else:
            code = "" if public else "401 Unauthorized"
        if code:
            return _refuse(code, environ, start_response)
        if by_json:
            return self.json_api(environ, start_response)
        environ["HTTP_AUTHORIZATION"] = _AMAZON
        signed = "X-Goog-Signature" in query
        if signed:
            environ["QUERY_STRING"] = ""
        for name in ("RAW_URI", "REQUEST_URI"):
            _, bucket, rest = re.split("(/[^/?]*)", environ[name], maxsplit=1)
            # object_store writes "%2D" for "-" in a bucket's name, which moto takes for another bucket.
            environ[name] = unquote(bucket) + (rest.partition("?")[0] if signed else rest)
        return self.app(environ, self._with_hash(environ, start_response))

    def _with_hash(self, environ: WSGIEnvironment, start_response: StartResponse) -> StartResponse:
        """Google states the CRC32C of the whole object with every answer that gives some of it."""

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            path = str(environ.get("RAW_URI") or environ["REQUEST_URI"]).partition("?")[0]
            bucket, _, key = unquote(path).lstrip("/").partition("/")
            if environ["REQUEST_METHOD"] == "GET" and key and status.startswith("20"):
                data = self.json_api.connect(f"http://{environ['HTTP_HOST']}").get_object(
                    Bucket=bucket, Key=key
                )
                crc = crc32c(data["Body"].read() + (b"!" if bucket.startswith(_LYING) else b"")).to_bytes(
                    4, "big"
                )
                headers = [*headers, ("x-goog-hash", f"crc32c={base64.b64encode(crc).decode()}")]
            return start_response(status, headers, *rest)

        return start

    def _metadata(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """What a metadata server answers: google-auth asks whether it is one, who it speaks for, and for a token."""
        path = environ["PATH_INFO"]
        answer: dict[str, Any] = {
            "email": _EMAIL,
            "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
        }
        if path.endswith("/token"):
            answer = {"access_token": self.token, "expires_in": 3600, "token_type": "Bearer"}
        body = b"project" if path.endswith("/project-id") else json.dumps(answer).encode()
        kind = "application/text" if path.endswith("/project-id") else "application/json"
        headers = [("Metadata-Flavor", "Google"), ("Content-Type", kind), ("Content-Length", str(len(body)))]
        start_response("200 OK", headers)
        return [body]

    def _exchange(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """OAuth's token endpoint: a token for what the service account's key signed."""
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)).decode()
        if not self._knows_token(dict(parse_qsl(body)).get("assertion", "")):
            answer, status = '{"error": "invalid_grant"}', "400 Bad Request"
        else:
            given = {"access_token": self.token, "token_type": "Bearer", "expires_in": 3600}
            answer, status = json.dumps(given), "200 OK"
        data = answer.encode()
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(data)))])
        return [data]

    def _knows_token(self, authorization: str) -> bool:
        from google.auth import jwt

        try:
            token = authorization.removeprefix("Bearer ")
            claims = jwt.decode(token, certs=self.public_key, audience=None)
        except ValueError:  # GoogleAuthError's too
            return False
        return bool(claims["iss"] == _EMAIL)

    def _knows_signature(self, environ: WSGIEnvironment, query: dict[str, str]) -> bool:
        """As in Google's "V4 signing process with your own program"; object_store signs for Google's host always."""
        from google.auth import crypt

        signature = bytes.fromhex(query.pop("X-Goog-Signature"))
        path = str(environ.get("RAW_URI") or environ["REQUEST_URI"]).partition("?")[0]
        canonical_query = "&".join(
            f"{quote(k, safe='~')}={quote(v, safe='~')}" for k, v in sorted(query.items())
        )
        request = "\n".join(
            [
                environ["REQUEST_METHOD"],
                path,
                canonical_query,
                "host:storage.googleapis.com",
                "",
                query["X-Goog-SignedHeaders"],
                "UNSIGNED-PAYLOAD",
            ]
        )
        scope = query["X-Goog-Credential"].partition("/")[2]
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = "\n".join([query["X-Goog-Algorithm"], query["X-Goog-Date"], scope, digest])
        return bool(crypt.RSAVerifier.from_string(self.public_key).verify(text, signature))


def _refuse(status: str, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
    body = b"<Error><Code>AccessDenied</Code><Message>Access denied.</Message></Error>"
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # or the connection cannot go on
    start_response(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
    return [body]
