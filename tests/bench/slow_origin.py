"""An origin that limits each connection, as object stores do: what counts is how many connections a client opens."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.bench.corpora import Corpus
from tests.bench.origin import SLOW_MB, FastOrigin
from tests.bench.peers import fresh, run_client
from tests.bench.table import Row, row


def measure(
    base: Path, origin: FastOrigin, corpus: Corpus, runs: int, say: Callable[[str], object]
) -> list[Row]:
    """Ours, free to choose and held to 16 ranges, beside s5cmd with its own settings and with 16 workers."""
    into = str(base / "fetched")
    s5cmd = shutil.which("s5cmd")
    clients: dict[str, tuple[list[str], Mapping[str, str]]] = {
        "llm-prefetch": (["stage", into, corpus.uri], {}),
        "llm-prefetch, at most 16 ranges": (["stage", into, corpus.uri], {"LLM_PREFETCH_CONCURRENCY": "16"}),
    }
    if s5cmd:
        tail = ["cp", f"{corpus.uri}/*", f"{into}/"]
        clients["s5cmd"] = (["program", s5cmd, *tail], {})
        clients["s5cmd, 16 workers"] = (["program", s5cmd, "--numworkers", "16", *tail], {})
    rates: dict[str, list[float]] = defaultdict(list)
    for turn in range(runs):
        for name, (arguments, env) in clients.items():
            say(f"{SLOW_MB} MiB/s on each connection, round {turn + 1} of {runs}: {name}")
            fresh(base / "fetched")
            run = run_client(arguments, origin.doors["slow"], env)
            rates[name].append(corpus.bytes / run.seconds / 1e6)
    shutil.rmtree(base / "fetched")
    what = f"stage {corpus.title}, {SLOW_MB} MiB/s on each connection"
    return [
        row(f"{what}: {name}" if n == 0 else f"  {name}", r, "MB/s")
        for n, (name, r) in enumerate(rates.items())
    ]
