"""Where the contract holds: each origin, by each transport, with each kind of credentials that makes a difference.

A `Place` is an empty prefix of a real server. What is put there goes through the origin itself where it writes, and
by the server's own door where it can only be read.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from llm_prefetch.origins import ObjectInfo, Origin, RangeBody, open_origin
from llm_prefetch.spec import Spec
from tests.real.hub import Repo
from tests.real.web import Web
from tests.samples import make_spec

_numbers = itertools.count()
ACCOUNT_HOST = "@devstoreaccount1.dfs.core.windows.net"
FSSPEC = "fsspec"
"""What ends the name of a place that is read by fsspec."""

WRITABLE = ("file", "s3", "gs-key", "gs-node", "az-key", "az-sas", "abfss-key", "memory")
LISTED = (*WRITABLE, "hf")
ALL = (*LISTED, "https")

BUCKETS = tuple(name for name in WRITABLE if name not in ("file", "memory"))
ODD_NAMES = [
    "a b",
    "a+b",
    "a%20b",
    "a#b",
    "a?b=c&d",
    "ünï",
    "~x",
    "a'\"b",
    "{a}",
    "[a]",
    "sub/deep/x",
    "-",
    "a:b",
    "*",
]


@dataclass
class Place:
    """An empty prefix."""

    uri: str
    transport: str = "auto"
    missing: str = ""
    """A prefix like it in a bucket, folder or Hub that does not exist."""
    put_there: Callable[[str, bytes], None] | None = None
    server: Any = None
    bucket: str = ""
    """Where `server` has it, if it is an object store."""
    stores: list[Origin] = field(default_factory=list)

    def open(self, uri: str = "") -> Origin:
        """The origin at this place, or at another of the same server."""
        return open_origin(uri or self.uri, self.transport)

    def put(self, path: str, data: bytes) -> None:
        """Write an object."""
        if self.put_there is not None:
            self.put_there(path, data)
            return
        self.stores = self.stores or [self.open()]
        self.stores[0].write(path, io.BytesIO(data), len(data))

    def spec(self, **options: Any) -> Spec:
        """A spec with this place for its one artifact."""
        return make_spec(self.uri, transport=self.transport, **options)


def at(schemes: tuple[str, ...]) -> pytest.MarkDecorator:
    """Run a test at each of these places, by each transport."""
    return pytest.mark.parametrize("place", names(schemes), indirect=True)


def names(schemes: tuple[str, ...]) -> list[Any]:
    """Parameters for the fixture `place`: each scheme by both transports, where there are two."""
    both = (f"{scheme}{end}" for scheme in schemes for end in ("", f"-{FSSPEC}"))
    here = ("file", "memory", "hf", "https")  # the Hub by fsspec is as slow as the emulators
    return [
        name if name in here else pytest.param(name, marks=pytest.mark.cloud)
        for name in both
        if name != "memory"  # fsspec's own: there is no other way
    ]


def make_place(name: str, request: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The place of that name, with an environment that leads to it."""
    scheme, *rest = name.split("-")
    place = _made(scheme, request, tmp_path)
    place.transport = FSSPEC if rest[-1:] == [FSSPEC] and scheme != "memory" else "auto"
    if "node" in rest:
        server = request.getfixturevalue("gcs")
        monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
        for variable, value in server.node_env.items():
            monkeypatch.setenv(variable, value)
        # google-auth reads these once, on import.
        host = server.node_env["GCE_METADATA_HOST"]
        monkeypatch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", host)
    elif "sas" in rest:
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", request.getfixturevalue("azure").token())
    return place


def _made(scheme: str, request: Any, tmp_path: Any) -> Place:
    number = next(_numbers)
    if scheme == "file":
        (tmp_path / "origin/prefix").mkdir(parents=True)
        return Place(f"file://{tmp_path}/origin/prefix", missing=f"file://{tmp_path}/none/prefix")
    if scheme == "memory":
        return Place(f"memory://origin-{number}/prefix", missing=f"memory://none-{number}/prefix")
    if scheme == "hf":
        return _of_hub(request.getfixturevalue("hub"))
    if scheme == "https":
        return _of_the_web(request.getfixturevalue("web"))
    server = request.getfixturevalue({"s3": "s3", "gs": "gcs"}.get(scheme, "azure"))
    bucket = server.create_bucket(f"paged-{number}")
    end = f"{ACCOUNT_HOST if scheme == 'abfss' else ''}/some/prefix"
    place = Place(f"{scheme}://{bucket}{end}", missing=f"{scheme}://no-{bucket}{end}")
    place.server, place.bucket = server, bucket
    return place


def _of_hub(hub: Any) -> Place:
    repo, files = Repo(), dict[str, bytes]()
    hub.repos["org/model"] = repo
    repo.commit(files)

    def commit(path: str, data: bytes) -> None:
        files[path] = data
        repo.commit(files)

    return Place("hf://org/model", missing="hf://org/none", put_there=commit)


def _of_the_web(web: Web) -> Place:
    def put(path: str, data: bytes) -> None:
        web.files[f"/some/prefix/{path}"] = data

    return Place(f"{web.url}/some/prefix", missing=f"{web.url}/none/prefix", put_there=put)


def take(body: RangeBody) -> bytes:
    """All of a range, by small pieces."""
    taken, buffer = b"", memoryview(bytearray(7))
    while count := body.readinto(buffer):
        taken += bytes(buffer[:count])
    return taken


def read_range(origin: Origin, item: ObjectInfo, start: int, length: int) -> bytes:
    """One range by a reader of its own."""
    reader = origin.reader()
    try:
        return take(reader.open_range(item, start, length))
    finally:
        reader.close()


def body_of(data: bytes) -> tuple[io.BytesIO, int]:
    """What `write` takes after the path."""
    return io.BytesIO(data), len(data)
