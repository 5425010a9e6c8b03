"""What the origin is asked for again: after a kill, and for a second version. Bytes are counted at the origin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from llm_prefetch import settings
from llm_prefetch.manifest import CHUNK_BYTES
from tests.bench.corpora import Corpus
from tests.bench.origin import SLOW_MB, FastOrigin
from tests.bench.peers import fresh, run_client
from tests.bench.samples import seal, write_random
from tests.bench.table import Row, row

_MB = 10**6


def after_kill(
    base: Path, origin: FastOrigin, corpus: Corpus, runs: int, say: Callable[[str], object]
) -> list[Row]:
    """SIGKILL a staging once half of its bytes left the origin, stage again, and count what was read twice."""
    extra, twice, killed_at = [], [], []
    # So few at once that half-way is not the last wave, on a small corpus too.
    most = min(settings.CONCURRENCY.get(), corpus.bytes // CHUNK_BYTES // 4)
    for turn in range(runs):
        say(f"resume after a kill, round {turn + 1} of {runs}")
        fresh(base / "fetched")
        mark = origin.mark()
        killed_at.append(_kill_half_way(base / "fetched", origin, corpus, most, mark) * 100)
        run_client(["stage", str(base / "fetched"), corpus.uri], origin.doors["plain"])
        extra.append((origin.data_bytes(mark) - corpus.bytes) / _MB)
        asked = Counter((answer.uri, answer.range) for answer in origin.served(mark))
        twice.append(float(sum(count - 1 for count in asked.values())))
        shutil.rmtree(base / "fetched")
    return [
        row("killed at", killed_at, "%", note="of the bytes had left the origin"),
        row("  chunks asked for twice", twice, "chunks", f"<= {most} chunks", "ranges in flight"),
        row("  origin bytes read beyond the total", extra, "MB", f"<= {most * CHUNK_BYTES / _MB:.0f} MB"),
    ]


def second_version(
    base: Path, origin: FastOrigin, corpus: Corpus, runs: int, say: Callable[[str], object]
) -> list[Row]:
    """Stage a version, then one that differs in one shard of four."""
    uri, share = _with_one_changed(origin, corpus), []
    for turn in range(runs):
        say(f"second version, round {turn + 1} of {runs}")
        fresh(base / "fetched")
        door = origin.doors["plain"]
        run_client(["stage", str(base / "fetched"), corpus.uri], door)
        mark = origin.mark()
        run_client(["stage", str(base / "fetched"), uri], door)
        share.append(origin.data_bytes(mark) * 100 / corpus.bytes)
        shutil.rmtree(base / "fetched")
    return [row("second version, 1 of 4 shards changed: origin bytes", share, "%", "<= 26 %")]


def _kill_half_way(root: Path, origin: FastOrigin, corpus: Corpus, most: int, mark: int) -> float:
    """The part of the bytes that the origin had sent when the staging was killed, all that was under way included."""
    door = origin.doors["slow"]  # where half-way lasts long enough to be met
    argv = [sys.executable, "-m", "tests.bench.client", "stage", str(root), corpus.uri]
    env = {**os.environ, **door.env, "LLM_PREFETCH_CONCURRENCY": str(most)}
    worker = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    while origin.data_bytes(mark) < corpus.bytes / 2:
        if worker.poll() is not None:
            raise RuntimeError("the staging ended before it could be killed")
        time.sleep(0.005)
    time.sleep(
        CHUNK_BYTES / (SLOW_MB * 2**20) / 2
    )  # an answer is logged at its end: meet the next ones half-way
    worker.kill()
    worker.wait()
    before, now = -1, origin.data_bytes(mark)
    while now != before:  # nginx logs an answer that was cut short when it notices
        time.sleep(0.5)
        before, now = now, origin.data_bytes(mark)
    return now / corpus.bytes


def _with_one_changed(origin: FastOrigin, corpus: Corpus) -> str:
    """The corpus with other bytes in its first shard; the other files are hard links."""
    prefix = f"{corpus.folder.name}changed"
    folder = origin.folder(prefix)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    first, *others = sorted(corpus.folder.glob("model-*"))
    write_random(folder / first.name, first.stat().st_size)
    for path in others:
        (folder / path.name).hardlink_to(path)
    seal(folder)
    return origin.write_listing(prefix)
