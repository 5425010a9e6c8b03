"""The clients that are measured side by side: ours, and what a user would pick instead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.corpora import Corpus
from tests.bench.origin import Door

_TIMEOUT = 1800
_MANY = 100


@dataclass(frozen=True)
class Peer:
    """One client: how it is started to fill a folder with a corpus."""

    name: str
    argv: Callable[[Corpus, Door, Path], list[str]]
    runs: int = 99
    """At most so many runs, where it is slow."""
    subfolder: str = ""
    """Where below the folder the files end up."""
    checked: bool = True
    """Whether the folder must hold the corpus in the end."""


@dataclass(frozen=True)
class Run:
    """What one run took."""

    seconds: float
    cpu: float
    peak: float
    durable: float
    """With a sync of the disk behind it."""
    more: Mapping[str, float]


OURS, S5CMD, RAY, S3FS = "llm-prefetch", "s5cmd", "Ray Serve LLM", "s3fs"
DISK = "dd, from zeros"


def peers() -> list[Peer]:
    """All of them, ours first."""
    found = [
        Peer(OURS, lambda corpus, _, folder: ["stage", str(folder), corpus.uri], checked=False),
        Peer(S5CMD, lambda corpus, _, folder: _program("s5cmd", "cp", f"{corpus.uri}/*", f"{folder}/")),
        Peer("curl -Z, 16 at once", _curl),
        Peer("boto3, 16 x 16 MiB", lambda corpus, _, folder: ["boto3", str(folder), corpus.uri, "tuned"]),
        Peer("boto3, as it comes", lambda corpus, _, folder: ["boto3", str(folder), corpus.uri], runs=1),
        Peer(
            RAY, lambda corpus, _, folder: ["ray", str(folder), corpus.uri], runs=2, subfolder="snapshots/*"
        ),
        Peer(S3FS, lambda corpus, _, folder: ["s3fs", str(folder), corpus.uri], runs=2),
        Peer(DISK, _dd, checked=False),
    ]
    return [peer for peer in found if peer.name != S5CMD or shutil.which("s5cmd")]


def run_peer(peer: Peer, corpus: Corpus, door: Door, folder: Path) -> Run:
    """Fill an empty `folder` on a synced disk, look whether all is there, and leave no large files.

    Many small ones stay until `throughput` removes them: ext4 looks long for a free inode where many files were
    deleted in the last minutes, and the next client would pay for it.

    Raises:
        RuntimeError: the client failed, or files are missing; some clients only log that.
    """
    fresh(folder)
    run = run_client(peer.argv(corpus, door, folder), door)
    if peer.checked:
        for base in folder.glob(peer.subfolder) if peer.subfolder else [folder]:
            got = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()}
            size = sum(path.stat().st_size for path in base.rglob("model-*"))
            if not got.issuperset(corpus.paths()) or size != corpus.bytes:
                raise RuntimeError(f"{peer.name} fetched {size} of {corpus.bytes} bytes of {corpus.name}")
    if len(corpus.sizes) < _MANY:
        shutil.rmtree(folder)
    return run


def run_client(arguments: list[str], door: Door, env: Mapping[str, str] | None = None) -> Run:
    """One of `tests.bench.client`, measured.

    Raises:
        RuntimeError: it failed.
    """
    argv = [sys.executable, "-m", "tests.bench.client", *arguments]
    done = subprocess.run(
        argv,
        env={**os.environ, **door.env, **(env or {})},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:3])} failed: {done.stderr.strip()[-600:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    begin = time.perf_counter()
    os.sync()
    durable = found["whole"] + time.perf_counter() - begin
    return Run(found["seconds"], found["cpu"], found["peak"], durable, found)


def fresh(folder: Path) -> None:
    """An empty folder, and a disk with nothing left to write."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()


def _program(name: str, *arguments: str) -> list[str]:
    return ["program", shutil.which(name) or name, *arguments]


def _curl(corpus: Corpus, door: Door, folder: Path) -> list[str]:
    config = folder.with_name(f"{folder.name}.curl")
    base = corpus.uri.replace("s3://", f"{door.endpoint}/")
    config.write_text("".join(f'url = "{base}/{p}"\noutput = "{folder}/{p}"\n' for p in corpus.paths()))
    how = ["-Z", "--parallel-immediate", "--parallel-max", "16", "--create-dirs", "--fail", "--silent"]
    return _program("curl", *how, "-K", str(config))


def _dd(corpus: Corpus, _: Door, folder: Path) -> list[str]:
    count = str(corpus.bytes // 2**20)
    return _program("dd", "if=/dev/zero", f"of={folder / 'zeros'}", "bs=1M", f"count={count}", "status=none")
