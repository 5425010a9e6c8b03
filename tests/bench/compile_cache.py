"""What a compile cache saves of an engine's start, on vLLM's CPU build: five starts that differ in one thing each.

Their seconds are vLLM's own ("init engine"), as the callback's evidence has them, and the evidence has to be right.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from llm_prefetch.caches.evidence import Outcome
from llm_prefetch.caches.install import cache_environment, install
from llm_prefetch.caches.places import CAPTURING
from llm_prefetch.store import NodeStore
from tests.bench.table import Row, ratio, row
from tests.real.checkpoint import write_checkpoint
from tests.real.hosts import Host, HostSpec
from tests.real.processes import scratch
from tests.real.world import World, world

_YAML = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-cpu.yaml"
_WEIGHTS = {"name": "weights", "uri": "s3://models/tiny-llama"}
_INSTALLS = 9
_RIGHT = {
    "cold": Outcome.NONE,
    "warm on the same node": Outcome.PARTIAL,
    "staged ahead on another node": Outcome.PARTIAL,
    "another engine path": Outcome.MISS,
    "another max_num_seqs": Outcome.MISS,
}
"""What the evidence has to say; on CPUs a graph that is there is compiled again, with the kernels beside it."""


def measure(runs: int, say: Callable[[str], object]) -> list[Row]:
    """Boot every case in each of `runs` new clusters of two hosts; a minute and more each."""
    found: dict[str, list[float]] = defaultdict(list)
    for turn in range(runs):
        specs = {1: HostSpec(num_cpus=4), 2: HostSpec(num_cpus=4)}
        with scratch("bench") as area, world(3, each=specs, spec=HostSpec(num_cpus=0)) as around:
            say(f"compile cache, round {turn + 1} of {runs}")
            _round(around, area.path, found, say)
    seconds = {name: found[name] for name in _RIGHT}
    return [
        *(row(f"init engine, {name}", values, "s") for name, values in seconds.items()),
        ratio("  staged ahead beside warm on the same node",
              seconds["staged ahead on another node"], seconds["warm on the same node"], "<= 1.1 x"),
        row("  evidence that was right, of five", found["right"], "cases", ">= 5 cases"),
        row("  a capture, beyond the replica's start", found["overhead"], "s", "<= 5 s"),
        row("  installing a staged cache", found["install"], "ms", "<= 200 ms", f"{found['bytes'][0] / 1e6:.1f} MB"),
    ]  # fmt: skip


def _round(around: World, folder: Path, found: dict[str, list[float]], say: Callable[[str], object]) -> None:
    one, other = around.cluster.hosts[1:]
    around.s3.create_bucket("models")
    model = write_checkpoint(folder / "model", says="I was compiled.")
    around.cli(around.head, "publish", model, _WEIGHTS["uri"])
    for deployment in ("tiny-llama", "elsewhere"):
        _stage(around, deployment, [_WEIGHTS])
    own = _watched(one, "own")
    right = 0

    def boot(case: str, host: Host, path: Path) -> None:
        nonlocal right
        say(f"  {case}")
        proof = _run(around, "prove", path, "--node", host.name)["proven"][0]["proof"]
        if proof["init_seconds"] is None:
            raise RuntimeError(f"{case}: {proof['reason']}")
        found[case].append(proof["init_seconds"])
        right += proof["outcome"] == _RIGHT[case]

    plain = _yaml(folder, "plain")
    boot("cold", one, _yaml(folder, "own", env=own))
    boot("warm on the same node", one, _yaml(folder, "own", env=own))
    report = _run(around, "capture", plain, "--to", "s3://models/cache", "--node", one.name)
    found["overhead"].append(report["seconds"] - report["start_seconds"])
    _stage(around, "tiny-llama", [_WEIGHTS, report["artifact"]])
    boot("staged ahead on another node", other, plain)
    # Staging leaves out a cache that was built for another path, so this engine is led to it by hand.
    staged = _watched(other, "caches/tiny-llama")
    boot("another engine path", other, _yaml(folder, "path", env=staged, deployment="elsewhere"))
    boot("another max_num_seqs", other, _yaml(folder, "seqs", max_num_seqs=8))
    found["right"].append(right)
    found["bytes"].append(report["captured"]["published"]["bytes"])
    for n in range(_INSTALLS):
        done = install(NodeStore(other.disk), f"bench-{n}", "compile", report["artifact"]["version"])
        found["install"].append(done.seconds * 1000)


def _watched(host: Host, cache: str) -> dict[str, str]:
    """The engine's variables for a cache root of its own; by one of them evidence is taken where no cache is staged."""
    return {**cache_environment(host.root / cache, "cpu"), CAPTURING: str(host.root / "told")}


def _yaml(
    folder: Path, name: str, *, env: Mapping[str, str] | None = None, deployment: str = "", **arguments: Any
) -> Path:
    """The example with torch.compile on, and one thing changed."""
    config = yaml.safe_load(_YAML.read_text())
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    llm["engine_kwargs"] |= {"enforce_eager": False, **arguments}
    llm["runtime_env"]["env_vars"] |= dict(env or {})
    if deployment:
        llm["callback_config"]["callback_kwargs"]["deployment"] = deployment
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _stage(around: World, deployment: str, artifacts: list[Any]) -> None:
    spec = json.dumps({"deployment": deployment, "artifacts": artifacts})
    around.cli(around.head, "stage", "--cluster", "-", stdin=spec)


def _run(around: World, *argv: str | Path) -> dict[str, Any]:
    """A command that boots an engine.

    Raises:
        RuntimeError: it has no answer.
    """
    command = [sys.executable, "-m", "llm_prefetch.cli", *argv, "--deadline", "900", "--json"]
    done = around.head.run(command, check=False, timeout=1000)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"{argv[0]}: {done.stderr[-2000:]}") from None
    if "error" in answer:
        raise RuntimeError(f"{argv[0]}: {answer['error']}")
    return answer
