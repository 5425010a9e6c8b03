"""Every client on every corpus, by plain HTTP and by TLS, in turns so that noise hits all alike."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench import peers
from tests.bench.corpora import Corpus
from tests.bench.origin import FastOrigin
from tests.bench.table import GB, Row, ratio, row

_DOORS = {"plain": "HTTP", "tls": "TLS"}


@dataclass(frozen=True)
class Sample:
    """One run of one client."""

    corpus: str
    door: str
    client: str
    bytes: int
    seconds: float
    durable: float
    cpu: float
    peak: float

    @property
    def rate(self) -> float:
        """Bytes per second, until the client says that it is done."""
        return self.bytes / self.seconds


def measure(
    base: Path, origin: FastOrigin, corpora: Mapping[str, Corpus], runs: int, say: Callable[[str], object]
) -> list[Sample]:
    """`runs` rounds; in each, every client once, beginning with another one each time."""
    samples: list[Sample] = []
    clients = peers.peers()
    scratch = base / "fetched"
    peers.fresh(scratch)
    for corpus in corpora.values():
        for door, title in _DOORS.items():
            corpus.warm()
            for turn in range(runs):
                first = turn * 3 % len(clients)
                for peer in clients[first:] + clients[:first]:
                    if turn >= peer.runs:
                        continue
                    say(f"{corpus.title}, {title}, round {turn + 1} of {runs}: {peer.name}")
                    try:
                        run = peers.run_peer(peer, corpus, origin.doors[door], scratch / str(len(samples)))
                    except RuntimeError as error:
                        if peer.name == peers.OURS:
                            raise
                        say(f"left out: {error}")
                        continue
                    numbers = (run.seconds, run.durable, run.cpu, run.peak)
                    samples.append(Sample(corpus.title, title, peer.name, corpus.bytes, *numbers))
    shutil.rmtree(scratch)
    return samples


def rows(samples: Iterable[Sample]) -> list[Row]:
    """The lines that have a target."""
    found = []
    for (corpus, door), clients in by_corpus(samples).items():
        ours = clients[peers.OURS]
        what = f"stage {corpus}, {door}"
        # The target of 1 GB/s is for the shards and plain HTTP.
        target = ">= 1 GB/s" if (corpus[0], door) == ("4", "HTTP") else ""
        found.append(row(what, [sample.rate / GB for sample in ours], "GB/s", target))
        found += [
            ratio(f"  beside {name}", [s.rate for s in ours], [s.rate for s in clients[name]], target)
            for name, target in ((peers.S5CMD, ">= 1 x"), (peers.RAY, ">= 4 x"), (peers.S3FS, ">= 4 x"))
            if name in clients
        ]
        found.append(row("  peak memory", [sample.peak / 1e6 for sample in ours], "MB", "<= 256 MB"))
        found.append(row("  processor seconds per GB", [s.cpu * GB / s.bytes for s in ours], "s/GB"))
    return found


def by_corpus(samples: Iterable[Sample]) -> dict[tuple[str, str], dict[str, list[Sample]]]:
    """Samples by corpus and door, then by client."""
    found: dict[tuple[str, str], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        found[sample.corpus, sample.door][sample.client].append(sample)
    return {key: dict(clients) for key, clients in found.items()}


def middle(samples: Iterable[Sample], what: Callable[[Sample], float]) -> float:
    """The median of something over `samples`."""
    return median(what(sample) for sample in samples)
