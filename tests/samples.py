"""Small things to stage: files, manifests, published folders, specs, and an origin that can misbehave."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from blake3 import blake3

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import OriginNotFoundError, PrefetchError
from llm_prefetch.ledger import Trace
from llm_prefetch.manifest import FileEntry, Listing, Manifest
from llm_prefetch.origins import ObjectInfo
from llm_prefetch.progress import Progress
from llm_prefetch.record import CommitRecord, read_record, write_record
from llm_prefetch.resolve import Source
from llm_prefetch.spec import Artifact, Spec
from llm_prefetch.stage_artifact import ArtifactReport, stage_artifact
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore
from llm_prefetch.transfer import Throttle

NOBODY = 65534
CHUNK = 8
"""Bytes of a chunk in the manifests made here, so that a file of a few bytes has several."""
FILES: Mapping[str, bytes] = {
    "config.json": b'{"a": 1}',
    "empty": b"",
    "layers/0/weights.bin": bytes(range(8)) * 4 + b"tail",
    "layers/1/weights.bin": b"the other layer's",
}
TOTAL = sum(len(data) for data in FILES.values())
WEIGHTS = "layers/0/weights.bin"
"""The largest of `FILES`."""


def make_folder(folder: Path, files: Mapping[str, bytes] = FILES) -> Path:
    """Write `files` below `folder`."""
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return folder


def make_manifest(files: Mapping[str, bytes] = FILES, chunk_bytes: int = CHUNK, **identity: Any) -> Manifest:
    """The manifest of `files`."""
    return Manifest(
        tuple(
            FileEntry(
                path,
                len(files[path]),
                tuple(
                    blake3(files[path][at : at + chunk_bytes]).hexdigest()
                    for at in range(0, len(files[path]), chunk_bytes)
                ),
            )
            for path in sorted(files)
        ),
        chunk_bytes,
        identity,
    )


def make_published(folder: Path, files: Mapping[str, bytes] = FILES, chunk_bytes: int = CHUNK) -> str:
    """A `file://` prefix with `files` and their manifest, in small chunks; returns the URI."""
    make_folder(folder, files)
    put_manifest(folder, make_manifest(files, chunk_bytes).to_json())
    return f"file://{folder}"


def put_manifest(folder: Path, body: bytes) -> None:
    """Write `body` where a manifest is looked for."""
    make_folder(folder, {manifests.PATH: body})


def take_data_away(folder: Path) -> None:
    """Leave of a published folder nothing but its manifest."""
    for path in FILES:
        (folder / path).unlink()


def make_artifact(uri: str = "fake://origin", name: str = "weights", **options: Any) -> Artifact:
    """An artifact of a spec."""
    return Artifact(name=name, uri=uri, **options)


def make_spec(*uris: str, deployment: str = "llama", **options: Any) -> Spec:
    """A spec with one artifact for each URI: `weights`, `weights1`, ..."""
    artifacts = [make_artifact(uri, f"weights{number or ''}", **options) for number, uri in enumerate(uris)]
    return Spec(deployment=deployment, artifacts=artifacts)


@dataclass(frozen=True)
class Read:
    """One range that was asked for; `attempt` counts the times, from 1."""

    path: str
    start: int
    length: int
    attempt: int


Fault = Callable[[Read], "bytes | Exception | None"]


@dataclass
class FakeOrigin:
    """Objects in memory. `fault` may answer a read with other bytes or an error; `piece` is the most at once."""

    files: Mapping[str, bytes] = field(default_factory=lambda: FILES)
    fault: Fault = lambda read: None
    piece: int = 5
    greedy: bool = False
    """Fill the whole buffer, whatever was asked for."""
    uri: str = "fake://origin"
    reads: list[Read] = field(default_factory=list)
    readers: int = 0
    """Readers that are open."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def list(self) -> Iterator[ObjectInfo]:
        for path, data in self.files.items():
            yield ObjectInfo(path, len(data), blake3(data).hexdigest())

    def stat(self, path: str) -> ObjectInfo | None:
        return next((info for info in self.list() if info.path == path), None)

    def read(self, path: str, limit: int) -> bytes:
        return self.files[path]

    def write(self, path: str, body: BinaryIO, size: int) -> None:
        raise NotImplementedError

    def reader(self) -> FakeReader:
        with self._lock:
            self.readers += 1
        return FakeReader(self)

    @property
    def bytes_read(self) -> int:
        return sum(read.length for read in self.reads)


@dataclass
class FakeReader:
    origin: FakeOrigin

    def open_range(self, item: ObjectInfo, start: int, length: int) -> FakeBody:
        origin = self.origin
        with origin._lock:
            attempt = 1 + sum((read.path, read.start) == (item.path, start) for read in origin.reads)
            read = Read(item.path, start, length, attempt)
            origin.reads.append(read)
        answer = origin.fault(read)
        if isinstance(answer, Exception):
            raise answer
        if item.path not in origin.files:
            raise OriginNotFoundError(f"no {item.path}", where=origin.uri, hint="look again")
        end = None if origin.greedy else start + length
        data = origin.files[item.path][start:end] if answer is None else answer
        return FakeBody(io.BytesIO(data), origin.piece)

    def close(self) -> None:
        pass


@dataclass
class FakeBody:
    data: io.BytesIO
    piece: int

    def readinto(self, buffer: memoryview, /) -> int:
        return self.data.readinto(buffer[: self.piece])


def make_source(
    origin: FakeOrigin | None = None, content: Manifest | Listing | None = None, **options: Any
) -> Source:
    """What `resolve` would answer for a fake origin."""
    origin = origin or FakeOrigin()
    return Source(make_artifact(**options), origin, content or make_manifest(origin.files))


def make_listing(origin: FakeOrigin) -> Listing:
    """The listing of a fake origin."""
    found = sorted(origin.list(), key=lambda info: info.path)
    return Listing(tuple(manifests.ListedFile(info.path, info.size, info.etag) for info in found))


def stage_source(
    store: NodeStore, source: Source, *, progress: Progress | None = None, stop: Stop | None = None
) -> ArtifactReport:
    """Stage one artifact from an origin that no URI leads to."""
    return stage_artifact(source, store, progress or Counter(), Throttle(), stop or Stop(), Trace())


@dataclass
class Counter:
    """A progress that adds up."""

    total: int = 0
    done: int = 0
    lines: list[str] = field(default_factory=list)
    on_start: Callable[[], None] = lambda: None
    on_advance: Callable[[int], None] = lambda delta: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, label: str, total_bytes: int) -> None:
        self.total += total_bytes
        self.on_start()

    def advance(self, delta_bytes: int) -> None:
        with self._lock:
            self.done += delta_bytes
        self.on_advance(delta_bytes)

    def say(self, line: str) -> None:
        self.lines.append(line)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def engine_files(store: NodeStore, name: str = "weights") -> dict[str, bytes]:
    """What an engine of `llama` reads: every file of an artifact with its bytes."""
    return tree(store.engine_path("llama", name).resolve())


def only_record(store: NodeStore, name: str = "weights") -> CommitRecord:
    """The one record of an artifact."""
    [path] = (store.root / "artifacts" / name).glob("*.json")
    record = read_record(store, name, path.stem)
    assert record is not None
    return record


def no_record(store: NodeStore) -> bool:
    """Whether nothing at all is committed."""
    return not list(store.root.glob("artifacts/*/*.json"))


def as_after_reboot(store: NodeStore, record: CommitRecord) -> CommitRecord:
    """Let the record be one that was made before the machine was rebooted, and never sealed."""
    record = replace(record, boot="another-boot")
    write_record(store, record)
    return record


def flip_byte(path: Path, at: int = 0) -> None:
    """Change one byte and leave size and time as they were, as a bad disk does."""
    found = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(found.st_mode)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to everything; changes nothing for a user who has none."""
    if os.geteuid() != 0:
        yield
        return
    # Whatever Python would import only now: nobody may not read root's home, and a failure would be remembered.
    for name in ("ascii", "utf-8", "idna"):
        codecs.lookup(name)
    importlib.import_module("llm_prefetch.origins.local")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        importlib.invalidate_caches()


@contextlib.contextmanager
def raises(kind: type[PrefetchError], exit_code: int, *fragments: str) -> Iterator[Any]:
    """Expect just this error, on one line that says what (with `fragments`), where and what next."""
    with pytest.raises(PrefetchError) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, repr(error)
    assert error.exit_code == exit_code
    assert error.message, repr(error)
    assert error.where, repr(error)
    assert error.hint, repr(error)
    assert "\n" not in str(error)
    for fragment in fragments:
        assert fragment in str(error)
