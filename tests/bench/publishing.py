"""Uploads: our publish, with digests, beside boto3's transfer manager, both into a bucket that forgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.bench.corpora import Corpus
from tests.bench.peers import Run, run_client
from tests.bench.sink import upload_sink
from tests.bench.table import GB, Row, ratio, row

_CLIENTS = {
    "publish": ["publish"],
    "boto3, as it comes": ["boto3-upload"],
    "boto3, 16 x 16 MiB": ["boto3-upload", "tuned"],
}


def measure(base: Path, corpus: Corpus, runs: int, say: Callable[[str], object]) -> list[Row]:
    """Upload `corpus` by plain HTTP and by TLS."""
    found = []
    for tls in (False, True):
        title = f"{corpus.title}, {'TLS' if tls else 'HTTP'}"
        corpus.warm()
        done: dict[str, list[Run]] = defaultdict(list)
        with upload_sink(base, tls=tls) as door:
            for turn in range(runs):
                for name, (client, *tuning) in _CLIENTS.items():
                    say(f"publish {title}, round {turn + 1} of {runs}: {name}")
                    uri = f"s3://bench/{client}{len(tuning)}{turn}"
                    done[name].append(run_client([client, str(corpus.folder), uri, *tuning], door))
        rates = {name: [corpus.bytes / run.seconds / GB for run in those] for name, those in done.items()}
        ours, theirs, tuned = rates.values()
        found += [
            row(f"publish {title}", ours, "GB/s"),
            row("  boto3's upload, as it comes", theirs, "GB/s"),
            row("  boto3's upload, 16 x 16 MiB", tuned, "GB/s"),
            ratio("  publish beside boto3, as it comes", ours, theirs, ">= 0.8 x"),
            ratio("  publish beside boto3, 16 x 16 MiB", ours, tuned),
            row("  peak memory", [run.peak / 1e6 for run in done["publish"]], "MB", "<= 256 MB"),
            row("  processor seconds per GB", [r.cpu * GB / corpus.bytes for r in done["publish"]], "s/GB"),
            row(
                "  of boto3's, as it comes",
                [r.cpu * GB / corpus.bytes for r in done["boto3, as it comes"]],
                "s/GB",
            ),
        ]
    return found
