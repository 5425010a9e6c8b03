"""Two versions of one deployment at a counting origin, a store, and what must hold in the store at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from llm_prefetch import manifest as manifests
from llm_prefetch.journal import read_journal
from llm_prefetch.live import check_deployment
from llm_prefetch.manifest import FileEntry, Manifest
from llm_prefetch.plan import all_chunks, find_committed
from llm_prefetch.record import Verdict, check_record, records
from llm_prefetch.resolve import Source, resolve
from llm_prefetch.spec import parse_spec
from llm_prefetch.store import NodeStore, open_store
from tests.crash.child import Job, Result
from tests.crash.origin import BUCKET, CountingOrigin

CHUNK = 64 * 2**10
CONCURRENCY = 4
DEPLOYMENT = "tiny"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Version:
    """One version of the deployment: the files of each artifact, and the spec that stages it."""

    files: dict[str, Files]
    spec: dict[str, Any]
    sources: list[Source]

    @property
    def bytes(self) -> int:
        return sum(len(body) for files in self.files.values() for body in files.values())


class Zygote:
    """The warm parent of the processes that die."""

    def __init__(self, origin: CountingOrigin) -> None:
        env = os.environ | origin.env | {"LLM_PREFETCH_CONCURRENCY": str(CONCURRENCY)}
        argv = [sys.executable, "-m", "tests.crash.child"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, text=True, env=env, cwd=Path(__file__).parents[2]
        )

    def run(self, *jobs: Job) -> list[Result]:
        """Run the jobs at once and wait for all."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([asdict(job) for job in jobs]) + "\n")
        self._process.stdin.flush()
        return [Result(**result) for result in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


@dataclass
class World:
    """The origin with both versions, the processes, and a base folder for stores."""

    origin: CountingOrigin
    zygote: Zygote
    base: Path
    one: Version
    two: Version
    small: World | None = None
    """The same with fewer files, for tests that kill very often."""
    _templates: dict[int, str] = field(default_factory=dict)

    def new_root(self) -> str:
        """A root that the processes may make."""
        return tempfile.mktemp(prefix="store-", dir=self.base)

    def stage(self, root: str, version: Version, **how: Any) -> Result:
        """Stage in one process."""
        return self.run(self.job(root, version, **how))[0]

    def run(self, *jobs: Job) -> list[Result]:
        return self.zygote.run(*jobs)

    def job(self, root: str, version: Version, **how: Any) -> Job:
        return Job(root, "stage", version.spec, **how)

    def prepared(self, version: Version) -> str:
        """A new root on which `version` is live: a copy, with its times, of one that was staged."""
        if id(version) not in self._templates:
            template = self._templates[id(version)] = self.new_root()
            assert_done(self.stage(template, version))
            self.assert_proven(template, version)
        self.origin.take_ranges()
        root = self.new_root()
        shutil.copytree(self._templates[id(version)], root, symlinks=True)
        return root

    def trail(self, job: Job) -> list[str]:
        """The steps and changes of a run that nobody kills."""
        path = self.base / "trail"
        path.unlink(missing_ok=True)
        assert_done(*self.run(replace(job, trail=str(path))))
        return path.read_text().splitlines()

    def live_version(self, root: str) -> Version | None:
        """The version whose bytes are those below `live/`, all of them."""
        engine = Path(root, "live", DEPLOYMENT)
        found = {name: read_tree(engine / name) for name in self.one.files}
        return next((version for version in (self.one, self.two) if version.files == found), None)

    def finished(self, root: str, version: Version) -> set[tuple[str, int]]:
        """Chunks of `version` that a journal or a commit record says are done, as key and first byte."""
        store, done = open_store(Path(root)), set()
        for source in version.sources:
            committed = find_committed(store, source) is not None
            entered = read_journal(store.partial(source.key) / "journal").done
            prefix = source.artifact.uri.removeprefix(f"s3://{BUCKET}/")
            for chunk in all_chunks(source):
                if committed or (chunk.file, chunk.index) in entered:
                    done.add((f"{prefix}/{source.content.files[chunk.file].path}", chunk.start))
        return done

    # --- what must hold ---

    def assert_sound(self, root: str, *allowed: Version | None) -> None:
        """No check says `HIT` on wrong bytes, and what is live is wholly one of `allowed`."""
        if not Path(root, "LAYOUT").exists():
            assert None in allowed
            return
        store = open_store(Path(root))
        contents = [files for version in (self.one, self.two) for files in version.files.values()]
        for record in records(store):
            if check_record(store, record.name, record.version).verdict is Verdict.HIT:
                assert read_tree(store.artifact(record.name, record.version)) in contents
        check = check_deployment(store, DEPLOYMENT)
        if check.ready:
            assert self.live_version(root) in [version for version in allowed if version]
            assert check_deployment(store, DEPLOYMENT, full=True).ready
        else:
            assert None in allowed, f"{check.verdict}: {check.reason}"

    def assert_converges(self, root: str, version: Version) -> None:
        """Staging again ends with `version` live and proven, and asks for no chunk that was finished."""
        self.origin.take_ranges()
        finished = self.finished(root, version) if Path(root, "LAYOUT").exists() else set()
        assert_done(self.stage(root, version))
        again = {(key, start) for key, start, _ in self.origin.take_ranges()} & finished
        assert not again
        self.assert_proven(root, version)

    def assert_proven(self, root: str, version: Version) -> None:
        """`version` is live, by the quick check, by the full check and by its bytes."""
        store = open_store(Path(root))
        assert check_deployment(store, DEPLOYMENT).verdict is Verdict.HIT
        assert check_deployment(store, DEPLOYMENT, full=True).verdict is Verdict.HIT
        assert self.live_version(root) is version


@contextmanager
def make_world(monkeypatch: Any) -> Iterator[World]:
    """Stores lie in memory where they can: a SIGKILL does not ask whether a disk is below, and syncs cost time."""
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="crash-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        with CountingOrigin() as origin:
            for name, value in origin.env.items():
                monkeypatch.setenv(name, value)
            zygote = Zygote(origin)
            try:
                small = World(origin, zygote, base, *(_version(origin, n, small=True) for n in (1, 2)))
                yield World(origin, zygote, base, *(_version(origin, n) for n in (1, 2)), small)
            finally:
                zygote.close()
    finally:
        shutil.rmtree(base)


def read_tree(folder: Path) -> Files:
    """Every file below `folder`."""
    base = Path(os.path.realpath(folder))
    return {
        path.relative_to(base).as_posix(): path.read_bytes() for path in base.rglob("*") if path.is_file()
    }


def assert_done(*results: Result) -> None:
    """All ended well."""
    assert [result for result in results if result.outcome != "done"] == []


def published(files: Files) -> Files:
    """The files with a manifest of small chunks beside them."""
    entries = tuple(
        FileEntry(path, len(body), tuple(_digest(body[at : at + CHUNK]) for at in range(0, len(body), CHUNK)))
        for path, body in sorted(files.items())
    )
    return files | {manifests.PATH: Manifest(entries, CHUNK).to_json()}


def store_of(root: str) -> NodeStore:
    return open_store(Path(root))


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def _version(origin: CountingOrigin, number: int, *, small: bool = False) -> Version:
    """A published artifact of several chunks a file, and one without a manifest, whose files are one chunk each."""
    rng = random.Random(number)
    weights = {
        "config.json": rng.randbytes(700),
        "model-00001.safetensors": rng.randbytes(5 * CHUNK + 123),
        "model-00002.safetensors": rng.randbytes(4 * CHUNK),
        "empty": b"",
        "sub/folder/tokenizer.json": rng.randbytes(CHUNK // 2),
    }
    compiled = {f"rank_{n}/graph.bin": rng.randbytes(50_000 + n) for n in range(4)} | {
        "key": b"k",
        "nil": b"",
    }
    if small:
        weights = {path: weights[path] for path in ("config.json", "sub/folder/tokenizer.json")}
        compiled = {"key": compiled["key"]}
    prefix = f"v{number}-small" if small else f"v{number}"
    uris = {
        "weights": origin.put(f"{prefix}/weights", published(weights)),
        "compile": origin.put(f"{prefix}/compile", compiled),
    }
    artifacts = [{"name": name, "uri": uri} for name, uri in uris.items()]
    spec = {"deployment": DEPLOYMENT, "artifacts": artifacts}
    sources = [resolve(artifact) for artifact in parse_spec(spec, "test").artifacts]
    return Version({"weights": weights, "compile": compiled}, spec, sources)
