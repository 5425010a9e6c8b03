"""A small Hub: the endpoints that huggingface_hub's client uses to read a model, and the CDN behind them.

Two HTTP servers in threads of this process. The CDN listens under another name, takes only addresses that the
Hub signed, and is where large files are. What each was asked is kept, with the headers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "hf_s3cret"
_PAGE = 3
"""Entries of a page of the tree, few enough that a test has several."""


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    sent: int = 0
    """Bytes of a file that went out."""


@dataclass
class Repo:
    """A model: commits with their files, and names of commits."""

    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    large: tuple[str, ...] = (".bin", ".safetensors")
    """Ends of the names of files that are in LFS."""
    served: dict[str, bytes] = field(default_factory=dict)
    """Bytes that are sent instead of those that the commit states."""
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], *names: str) -> str:
        """Add a commit of `files` and let `names` be it; returns its id."""
        body = "".join(f"{path} {hashlib.sha1(files[path]).hexdigest()}\n" for path in sorted(files))
        made = hashlib.sha1(body.encode()).hexdigest()
        self.commits[made] = dict(files)
        self.names.update(dict.fromkeys(names or ("main",), made))
        return made


@dataclass
class Hub:
    """The running servers."""

    endpoint: str = ""
    cdn: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Asked] = field(default_factory=list)
    cdn_requests: list[Asked] = field(default_factory=list)
    signatures: dict[str, bytes] = field(default_factory=dict)
    """What each signed address leads to."""

    def forget(self) -> None:
        """Start counting anew."""
        self.requests.clear()
        self.cdn_requests.clear()

    def expire(self) -> None:
        """No address that was signed until now is good any more."""
        self.signatures.clear()

    @property
    def sent(self) -> int:
        """Bytes of files that went out."""
        return sum(asked.sent for asked in (*self.requests, *self.cdn_requests))


def git_id(data: bytes) -> str:
    """What git calls a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Run an empty Hub."""
    hub = Hub()
    with _serving(_HubHandler, hub) as port, _serving(_CdnHandler, hub) as cdn_port:
        hub.endpoint, hub.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{cdn_port}"
        yield hub


@contextlib.contextmanager
def _serving(handler: type[_Handler], hub: Hub) -> Iterator[int]:
    bound = type(handler.__name__, (handler,), {"hub": hub})
    with _Server(("127.0.0.1", 0), bound) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away amid an answer is none."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.asked = Asked(self.command, unquote(url.path), url.query, dict(self.headers))
        self.answer(self.asked.path, parse_qs(url.query))

    do_HEAD = do_GET  # noqa: N815

    def answer(self, path: str, query: dict[str, list[str]]) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_json(self, body: object, **headers: object) -> None:
        self.send(200, json.dumps(body).encode(), Content_Type="application/json", **headers)

    def send_file(self, data: bytes, **headers: object) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None or self.command == "HEAD":
            body, status = data, 200
        else:
            body, status = data[int(match[1]) : int(match[2]) + 1], 206
            headers["Content-Range"] = f"bytes {match[1]}-{int(match[1]) + len(body) - 1}/{len(data)}"
        self.asked.sent = len(body) if self.command == "GET" else 0
        self.send(status, body, **headers)


class _HubHandler(_Handler):
    def answer(self, path: str, query: dict[str, list[str]]) -> None:
        self.hub.requests.append(self.asked)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        for pattern, act in (
            (r"/api/models/([^/]+/[^/]+)", self._info),
            (r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._info),
            (r"/api/models/([^/]+/[^/]+)/tree/([0-9a-f]{40})/(.+)", self._folder),
            (r"/api/models/([^/]+/[^/]+)/tree/(.+)", self._tree),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            (r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)", self._serve),
        ):
            if match := re.fullmatch(pattern, path):
                repo = self.hub.repos.get(match[1])
                if repo is None or (repo.private and not known):
                    return self._refuse(401, "RepoNotFound", "Repository not found")
                commit = match[2] if match.lastindex > 1 else "main"
                commit = repo.names.get(commit, commit)
                if commit not in repo.commits:
                    return self._refuse(404, "RevisionNotFound", "Invalid rev id")
                if act in (self._resolve, self._serve) and repo.gated and not known:
                    return self._refuse(401, "GatedRepo", "Access to this model is restricted")
                return act(match, repo, commit, query)
        return self.send(404)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send(status, X_Error_Code=code, X_Error_Message=message)

    def _info(self, match: re.Match[str], repo: Repo, commit: str, query: dict[str, list[str]]) -> None:
        self.send_json({"id": match[1], "modelId": match[1], "sha": commit, "siblings": [], "tags": []})

    def _folder(self, match: re.Match[str], repo: Repo, commit: str, query: dict[str, list[str]]) -> None:
        """One folder, which `HfFileSystem` looks into to describe a file."""
        within = {
            path: data for path, data in repo.commits[commit].items() if path.rpartition("/")[0] == match[3]
        }
        if not within:
            return self._refuse(404, "EntryNotFound", f"{match[3]} does not exist")
        return self._entries(repo, within, query)

    def _tree(self, match: re.Match[str], repo: Repo, commit: str, query: dict[str, list[str]]) -> None:
        self._entries(repo, repo.commits[commit], query)

    def _entries(self, repo: Repo, files: Mapping[str, bytes], query: dict[str, list[str]]) -> None:
        folders = {path.rpartition("/")[0] for path in files if "/" in path}
        entries: list[dict[str, object]] = [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)
        ]
        for path, data in sorted(files.items()):
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_id(data)}
            if path.endswith(repo.large):
                oid = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 130}
            entries.append(entry)
        start = int(query.get("cursor", ["0"])[0])
        more = {}
        if start + _PAGE < len(entries):
            here = quote(urlsplit(self.path).path, safe="/%")
            more["Link"] = f'<{self.hub.endpoint}{here}?recursive=True&cursor={start + _PAGE}>; rel="next"'
        self.send_json(entries[start : start + _PAGE], **more)

    def _resolve(self, match: re.Match[str], repo: Repo, commit: str, query: dict[str, list[str]]) -> None:
        data = repo.served.get(match[3], repo.commits[commit].get(match[3]))
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        stated = {"X_Repo_Commit": commit}
        if not match[3].endswith(repo.large):
            there = f"/api/resolve-cache/models/{match[1]}/{commit}/{quote(match[3])}"
            return self.send(307, Location=there, **stated)
        signature = secrets.token_hex(8)
        self.hub.signatures[signature] = data
        stated["X_Linked_Etag"] = f'"{hashlib.sha256(repo.commits[commit][match[3]]).hexdigest()}"'
        stated["X_Linked_Size"] = str(len(data))
        return self.send(302, Location=f"{self.hub.cdn}/blob?X-Signature={signature}", **stated)

    def _serve(self, match: re.Match[str], repo: Repo, commit: str, query: dict[str, list[str]]) -> None:
        data = repo.served.get(match[3], repo.commits[commit][match[3]])
        self.send_file(data, ETag=f'"{git_id(data)}"', X_Repo_Commit=commit)


class _CdnHandler(_Handler):
    def answer(self, path: str, query: dict[str, list[str]]) -> None:
        self.hub.cdn_requests.append(self.asked)
        data = self.hub.signatures.get(query.get("X-Signature", [""])[0])
        if data is None:
            self.send(403)
        elif "If-Match" in self.headers:
            self.send(412)  # its tags are not the Hub's
        else:
            self.send_file(data, ETag='"of-the-cdn"')
