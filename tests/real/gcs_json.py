"""Google's JSON API, which gcsfs speaks, for the same objects that `tests.real.gcs` serves by the XML API.

Objects are listed (by pages of three, so that a test has several), described, read by ranges, uploaded at once or in
parts, and deleted. Each call is made of calls to moto by the server's own door. Who may ask is decided by
`tests.real.gcs` before it comes here.

Not covered: generations but as a number that changes with the bytes, preconditions, copies, and all that is no object.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

PATH = re.compile(r"/(?:(?:download|upload)/)?storage/v1/")
_PAGE = 3
_OBJECTS = re.compile(r"/storage/v1/b/([^/]+)/o/?")
_OBJECT = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/(.+)")
_UPLOADS = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


@dataclass
class JsonApi:
    """The WSGI application; `connect` gives a client of moto at an address."""

    connect: Callable[[str], Any]
    uploads: dict[str, tuple[str, str, bytes]] = field(default_factory=dict)
    """Bucket, name and what came so far, by the number of an upload in parts."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        path = str(environ.get("RAW_URI") or environ["REQUEST_URI"]).partition("?")[0]
        query = {name: values[-1] for name, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        host = f"http://{environ['HTTP_HOST']}"
        client = self.connect(host)
        try:
            status, headers, answer = self._answer(environ, path, query, body, client, host)
        except client.exceptions.ClientError as error:
            code = error.response["ResponseMetadata"]["HTTPStatusCode"]
            status, headers = f"{code} {error.response['Error']['Code']}", {}
            answer = {"error": {"code": code, "message": error.response["Error"]["Code"]}}
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        kind = "application/octet-stream" if isinstance(answer, bytes) else "application/json"
        given = {"Content-Type": kind, "Content-Length": str(len(data)), **headers}
        start_response(status, list(given.items()))
        return [data]

    def _answer(
        self,
        environ: WSGIEnvironment,
        path: str,
        query: dict[str, str],
        body: bytes,
        client: Any,
        host: str,
    ) -> tuple[str, dict[str, str], Any]:
        method = environ["REQUEST_METHOD"]
        if match := _UPLOADS.fullmatch(path):
            return self._upload(environ, unquote(match[1]), query, body, client, host)
        if match := _OBJECTS.fullmatch(path):
            return "200 OK", {}, _list(client, unquote(match[1]), query)
        match = _OBJECT.fullmatch(path)
        if match is None:
            return "404 Not Found", {}, {"error": {"code": 404, "message": "no such method"}}
        at = {"Bucket": unquote(match[1]), "Key": unquote(match[2])}
        if method == "DELETE":
            client.delete_object(**at)
            return "204 No Content", {}, b""
        if query.get("alt") != "media":
            return "200 OK", {}, _describe(client, **at)
        wanted = {"Range": environ["HTTP_RANGE"]} if "HTTP_RANGE" in environ else {}
        found = client.get_object(**at, **wanted)
        shown = {"Content-Range": found["ContentRange"]} if wanted else {}
        return ("206 Partial Content" if wanted else "200 OK"), shown, found["Body"].read()

    def _upload(
        self,
        environ: WSGIEnvironment,
        bucket: str,
        query: dict[str, str],
        body: bytes,
        client: Any,
        host: str,
    ) -> tuple[str, dict[str, str], Any]:
        if query["uploadType"] == "multipart":
            # Two parts: what it is to be, and its bytes.
            between = f"\n--{environ['CONTENT_TYPE'].partition('boundary=')[2].strip(chr(34))}".encode()
            about, _, rest = body.partition(b"\n\n")[2].partition(between + b"\n")
            name = json.loads(about)["name"]
            data = rest.partition(b"\n\n")[2].removesuffix(between + b"--")
            client.put_object(Bucket=bucket, Key=name, Body=data)
            return "200 OK", {}, _describe(client, bucket, name)
        if "upload_id" not in query:
            number = str(next(self._numbers))
            self.uploads[number] = (bucket, json.loads(body)["name"], b"")
            there = f"{host}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={number}"
            return "200 OK", {"Location": there}, b""
        if environ["REQUEST_METHOD"] == "DELETE":  # given up
            self.uploads.pop(query["upload_id"], None)
            return "499 Client Closed Request", {}, {}
        bucket, name, before = self.uploads[query["upload_id"]]
        self.uploads[query["upload_id"]] = (bucket, name, before + body)
        if environ["HTTP_CONTENT_RANGE"].endswith("/*"):
            return "308 Resume Incomplete", {"Range": f"bytes=0-{len(before + body) - 1}"}, b""
        client.put_object(Bucket=bucket, Key=name, Body=before + body)
        return "200 OK", {}, _describe(client, bucket, name)


def _list(client: Any, bucket: str, query: dict[str, str]) -> dict[str, Any]:
    given = {"ContinuationToken": query["pageToken"]} if "pageToken" in query else {}
    if "delimiter" in query:
        given["Delimiter"] = query["delimiter"]
    size = min(_PAGE, int(query.get("maxResults") or _PAGE))
    found = client.list_objects_v2(Bucket=bucket, Prefix=query.get("prefix", ""), MaxKeys=size, **given)
    answer: dict[str, Any] = {"kind": "storage#objects"}
    if items := [_describe(client, bucket, entry["Key"]) for entry in found.get("Contents", [])]:
        answer["items"] = items
    if prefixes := [entry["Prefix"] for entry in found.get("CommonPrefixes", [])]:
        answer["prefixes"] = prefixes
    if found["IsTruncated"]:
        answer["nextPageToken"] = found["NextContinuationToken"]
    return answer


def _describe(client: Any, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803 (boto3's names)
    found = client.head_object(Bucket=Bucket, Key=Key)
    tag = found["ETag"].strip('"')
    answer = {
        "kind": "storage#object",
        "bucket": Bucket,
        "name": Key,
        "size": str(found["ContentLength"]),
        "etag": tag,
        "generation": str(zlib.crc32(tag.encode())),
        "updated": f"{found['LastModified']:%Y-%m-%dT%H:%M:%SZ}",
        "timeCreated": f"{found['LastModified']:%Y-%m-%dT%H:%M:%SZ}",
    }
    if "-" not in tag:  # as with Google: none of an object that was put together
        answer["md5Hash"] = base64.b64encode(bytes.fromhex(tag)).decode()
    return answer
