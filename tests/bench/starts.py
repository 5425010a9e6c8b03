"""Whole starts of a real Ray Serve LLM replica: from staged files, again on the same node, and by Ray's own download."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tests.bench.origin import FastOrigin, fast_origin
from tests.bench.samples import seal
from tests.bench.table import Grid, Row, figure, ratio, row
from tests.real.checkpoint import write_checkpoint
from tests.real.hosts import Cluster, HostSpec, hosts
from tests.real.serve_app import chat, serve_llm

_YAML = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-cpu.yaml"
_RATE = "1gbit"
STAGED, AGAIN = "staged ahead", "a restart on the same node"
LOCAL, DOWNLOADED = "Ray's default, model on the disk", "Ray's default, from S3 by 1 Gbit/s"


@dataclass(frozen=True)
class Sample:
    """One start; all in seconds."""

    kind: str
    ready: float
    """From the request to Serve until the application runs."""
    before_engine: float
    """What our hooks took, or Ray's node initialisation."""
    phases: Mapping[str, float]


def measure(base: Path, runs: int, say: Callable[[str], object], *, quick: bool) -> list[Sample]:
    """Start a replica in each of the four ways, `runs` times, one after the other.

    Raises:
        RuntimeError: there is no right to shape a network, or a replica did not start.
    """
    if importlib.util.find_spec("vllm") is None:
        say("vLLM's CPU build is not installed: without starts of replicas")
        return []
    folder = base / "starts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    found: list[Sample] = []
    with _surroundings(folder, megabytes=60 if quick else 1000) as bench:
        bench.start(AGAIN, say, "to warm up")
        for turn in range(runs):
            bench.stage_anew()
            ways = (STAGED, AGAIN, LOCAL, DOWNLOADED)
            found += [bench.start(kind, say, f"round {turn + 1} of {runs}") for kind in ways]
    shutil.rmtree(folder)
    return found


def rows(samples: list[Sample]) -> list[Row]:
    """The lines with targets."""
    if not samples:
        return []
    ready: dict[str, list[float]] = defaultdict(list)
    before: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        ready[sample.kind].append(sample.ready)
        before[sample.kind].append(sample.before_engine)
    added = [seconds * 1000 for seconds in before[STAGED] + before[AGAIN]]
    return [
        row(
            "replica: added by the callback on a hit",
            added,
            "ms",
            "<= 50 ms",
            "both hooks, all before the engine",
        ),
        row("  Ray's node initialisation, nothing to download", before[LOCAL], "s"),
        row(
            "replica ready, staged ahead",
            ready[STAGED],
            "s",
            note="from the request until the application runs",
        ),
        row("  a restart on the same node, all warm", ready[AGAIN], "s"),
        ratio("  staged ahead beside that restart", ready[STAGED], ready[AGAIN], "<= 1.05 x"),
        row("  Ray's default, model on the disk", ready[LOCAL], "s"),
        row("  Ray's default, 1 GB from S3 by 1 Gbit/s", ready[DOWNLOADED], "s"),
        ratio("  Ray's default from S3 beside staged ahead", ready[DOWNLOADED], ready[STAGED]),
    ]


def breakdown(samples: list[Sample]) -> Grid:
    """Where the starts spend their time: medians of each phase, a column for each way."""
    kinds = list(dict.fromkeys(sample.kind for sample in samples))
    names = list(dict.fromkeys(name for sample in samples for name in sample.phases))

    def cell(kind: str, name: str) -> str:
        values = [s.phases[name] for s in samples if s.kind == kind and name in s.phases]
        return f"{figure(median(values))} s" if values else ""

    return ("phase", *kinds), [(name, *(cell(kind, name) for kind in kinds)) for name in names]


@dataclass(frozen=True)
class _Bench:
    """One host with Ray, and an origin that it reaches over the network."""

    cluster: Cluster
    origin: FastOrigin
    model: Path
    uri: str
    folder: Path

    def stage_anew(self) -> None:
        """What is staged now has never been started from."""
        host = self.cluster.head
        for entry in host.disk.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        spec = {"deployment": "tiny-llama", "artifacts": [{"name": "weights", "uri": self.uri}]}
        argv = [sys.executable, "-m", "llm_prefetch.cli", "stage", "-"]
        host.run(argv, stdin=json.dumps(spec), timeout=600)

    def start(self, kind: str, say: Callable[[str], object], when: str) -> Sample:
        """Start a replica, ask it something, and take it down."""
        say(f"{kind}, {when}")
        host, clock = self.cluster.head, self.folder / "clock.json"
        clock.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "home" / ".cache" / "huggingface", ignore_errors=True)
        with contextlib.ExitStack() as stack:
            if kind == DOWNLOADED:
                host.shape(_RATE)
                stack.callback(host.shape)
            app = stack.enter_context(
                serve_llm(
                    self._yaml(kind),
                    dashboard=self.cluster.dashboard_url,
                    host=host.ip,
                    temp_dirs=[host.folder / "ray"],
                    env={
                        "BENCH_CLOCK": str(clock),
                        "HF_HOME": str(self.folder / "home" / ".cache" / "huggingface"),
                    },
                    deadline=900,
                )
            )
            chat(app.base_url, "tiny-llama", "Are you there?")
        told: dict[str, Any] = json.loads(clock.read_text())
        if kind in (STAGED, AGAIN):
            ledger = [
                json.loads(line) for line in (host.disk / "ledger" / "ledger.jsonl").read_text().splitlines()
            ]
            told |= [entry for entry in ledger if entry["kind"] == "engine"][-1]
        phases: dict[str, float] = defaultdict(float)
        for phase in told["phases"]:
            phases[phase["phase"]] += phase["seconds"]
        return Sample(kind, app.seconds, told.get("added", told.get("node_init", 0.0)), dict(phases))

    def _yaml(self, kind: str) -> Path:
        config = yaml.safe_load(_YAML.read_text())
        (llm,) = config["applications"][0]["args"]["llm_configs"]
        source: Any = str(self.model) if kind == LOCAL else {"bucket_uri": self.uri}
        llm["model_loading_config"]["model_source"] = source
        ours = {"deployment": "tiny-llama", "on_miss": ["fail"]}
        llm["callback_config"] = (
            {"callback_class": "tests.bench.clocks.Ours", "callback_kwargs": ours}
            if kind in (STAGED, AGAIN)
            else {"callback_class": "tests.bench.clocks.Rays"}
        )
        path = self.folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        return path


@contextlib.contextmanager
def _surroundings(folder: Path, megabytes: float) -> Iterator[_Bench]:
    with contextlib.ExitStack() as stack:
        origins: list[FastOrigin] = []

        def serve(gateway: str) -> Mapping[str, str]:
            origins.append(stack.enter_context(fast_origin(folder, host=gateway)))
            return origins[0].doors["plain"].env | {"AWS_ALLOW_HTTP": "true"}

        cluster = stack.enter_context(hosts(1, spec=HostSpec(num_cpus=4), env=serve, isolate=True))
        (origin,) = origins
        model = write_checkpoint(
            origin.folder("starts"), hidden=1024, layers=4, shards=8, megabytes=megabytes
        )
        seal(model)
        bench = _Bench(cluster, origin, model, origin.write_listing("starts"), folder)
        bench.stage_anew()
        yield bench
