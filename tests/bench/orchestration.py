"""What orchestration costs beyond the bytes: the plan of a large cluster, and a run of the flow that finds all there.

A child process does what is measured: `-m tests.bench.orchestration plan FOLDER`, or `stage SPEC RUNS` on the head host.
"""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm_prefetch import manifest as manifests
from llm_prefetch.manifest import Manifest
from llm_prefetch.record import make_record, write_record
from llm_prefetch.store import NodeStore, open_store
from tests.bench.samples import lay_out, publish_random, sparse_manifest
from tests.bench.table import GB, Row, row
from tests.real.hosts import HostSpec, hosts
from tests.real.prefect_server import prefect_server

_NODES, _FILES, _HOSTS = 1000, 300, 8
_SETTLE_SECONDS = 10.0
_RAYS_OWN = {"RAY_enable_worker_prestart": "1", "RAY_prestart_worker_first_driver": "1"}
"""Workers that wait for work, as Ray has them unless told otherwise; our hosts for tests tell it otherwise."""
_ROOT = Path("/tmp/llm-prefetch-bench-orchestration")


def measure(base: Path, runs: int, say: Callable[[str], object]) -> list[Row]:
    """Plan a simulated cluster, and stage what is there on eight real hosts.

    Raises:
        RuntimeError: hosts, server or a child process failed.
    """
    return [*_plan_rows(base, runs, say), *_stage_rows(base, runs, say)]


def _plan_rows(base: Path, runs: int, say: Callable[[str], object]) -> list[Row]:
    folder = base / "orchestration"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    manifest = sparse_manifest(_FILES, 200 * GB)
    (folder / "origin" / manifests.FOLDER).mkdir(parents=True)
    (folder / "origin" / manifests.PATH).write_bytes(manifest.to_json())
    for kind, files in {"empty": 0, "older": 3 * _FILES // 4, "staged": _FILES}.items():
        _inventory(folder / kind, manifest, files)
    found = []
    for turn in range(runs):
        say(f"plan for {_NODES} nodes, round {turn + 1} of {runs}")
        found.append(_child([sys.executable, "-m", "tests.bench.orchestration", "plan", str(folder)]))
    shutil.rmtree(folder)
    what = f"plan for {_NODES:,} nodes, {_FILES} files, 200 GB"
    note = "simulated: one node of each kind plans, the others answer as theirs; without Ray's own part"
    return [
        row(what, [one["seconds"] for one in found], "s", "<= 5 s", note),
        row("  peak memory", [one["peak"] / 1e6 for one in found], "MB", "<= 500 MB"),
        row("  sent by a node", [float(one["answer"]) for one in found], "bytes"),
        row("  the part of an empty node", [one["node"] * 1e3 for one in found], "ms"),
    ]


def _inventory(root: Path, manifest: Manifest, files: int) -> None:
    """A node store that holds the first `files` files of the version, as another version if they are not all."""
    store = open_store(root, create=True)
    if files:
        held = manifest.select([file.path for file in manifest.files[:files]])
        _commit(store, held)


def _commit(store: NodeStore, manifest: Manifest) -> None:
    lay_out(store.artifact("weights", manifest.version), manifest)
    store.manifest("weights", manifest.version).write_bytes(manifest.to_json())
    write_record(store, make_record(store, "weights", manifest, uri="file:///none", listing="", boot=""))


def _stage_rows(base: Path, runs: int, say: Callable[[str], object]) -> list[Row]:
    folder = base / "orchestration"
    publish_random(folder, [64 * 2**10] * _FILES)
    say(f"starting {_HOSTS} hosts, a Prefect server, and staging once")
    with _surroundings() as (cluster, env):
        uri = f"file://{folder}"
        spec = {"deployment": "bench", "artifacts": [{"name": "weights", "uri": uri}]}
        argv = [sys.executable, "-m", "tests.bench.orchestration", "stage", json.dumps(spec), str(runs)]
        done = cluster.head.run(argv, env=env, timeout=900, check=False)
    shutil.rmtree(folder)
    found = _answer(done)
    beyond = [ours - empty for ours, empty in zip(found["stage"], found["empty"], strict=True)]
    return [
        row(f"flow stage, nothing to do on {_HOSTS} nodes, beyond an empty flow", beyond, "s", "<= 3 s"),
        row("  the run itself", found["stage"], "s"),
        row("  a run on one of these nodes", found["alone"], "s", note="which has the processors for itself"),
        row("  an empty flow", found["empty"], "s"),
        row("  of that: to connect to Ray", found["connect"], "s"),
        row(
            "  an empty actor of Ray's on each of these nodes",
            found["actors"],
            "s",
            note="the hosts share our processors",
        ),
        row(f"plan on {_HOSTS} nodes", found["plan"], "s", note="300 files; with Ray's own part"),
    ]


@contextmanager
def _surroundings() -> Iterator[tuple[Any, Mapping[str, str]]]:
    spec = HostSpec(num_cpus=1)
    with (
        hosts(1, root=_ROOT, spec=spec, env=_RAYS_OWN) as cluster,
        prefect_server(cluster.gateway_ip, 300) as server,
    ):
        for _ in range(_HOSTS - 1):  # all at once, they would wait for each other's processors for too long
            cluster.add_host(spec)
        yield cluster, server.env


def _child(argv: Sequence[str]) -> dict[str, Any]:
    return _answer(subprocess.run(argv, capture_output=True, text=True, check=False))


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        raise RuntimeError(f"the child failed: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def plan(folder: Path) -> dict[str, float]:
    """In the child: plan as the driver does, where the nodes of each kind answer alike."""
    from llm_prefetch.cluster import Answer, Node
    from llm_prefetch.cluster.planning import Planned, plan_here, plan_nodes
    from llm_prefetch.spec import Spec

    uri = f"file://{folder / 'origin'}"
    spec = Spec.model_validate({"deployment": "bench", "artifacts": [{"name": "weights", "uri": uri}]})
    stores = [open_store(folder / kind) for kind in ("empty", "older", "staged")]
    nodes = [
        Node(f"{number:056x}", f"10.0.{number // 250}.{number % 250}", f"host{number}")
        for number in range(_NODES)
    ]
    sent: dict[tuple[int, bool], bytes] = {}
    seconds: dict[tuple[int, bool], float] = {}

    def ask(asked: Sequence[Node], known: Any) -> list[Answer[Planned]]:
        answers = []
        for node in asked:
            kind = (int(node.id, 16) % len(stores), known is None)
            if kind not in sent:
                begin = time.perf_counter()
                sent[kind] = pickle.dumps(plan_here(spec, stores[kind[0]], known))
                seconds[kind] = time.perf_counter() - begin
            answers.append(Answer(node, pickle.loads(sent[kind])))
        return answers

    begin = time.perf_counter()
    found = plan_nodes(spec, nodes, ask)
    json.dumps(found.rows())
    took = time.perf_counter() - begin
    assert len(found.rows()) == _NODES
    assert not found.failed
    assert len({one["fetch_bytes"] for one in found.rows()}) == len(stores)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": took, "peak": peak, "answer": len(sent[0, False]), "node": seconds[0, False]}


def stage(spec: dict[str, Any], runs: int) -> dict[str, list[float]]:
    """In the child, on the head: the flow beside one that does nothing, each in turn, once all is staged.

    A run counts until Prefect calls it Completed. The call returns up to a second later: the thread of its heartbeats
    sleeps in steps of a second, and is waited for (`prefect/flow_engine.py`, 3.7).
    """
    import flows.stage  # first: it sets what Prefect reads when it is imported

    # isort: split
    from prefect import flow

    from llm_prefetch.cluster import connected, plan_cluster, select_nodes
    from llm_prefetch.spec import Spec

    empty = flow(name="empty", persist_result=False)(lambda: None)
    parsed = Spec.model_validate(spec)
    with connected():
        *_, one = select_nodes(parsed.nodes)
    alone = Spec.model_validate({**spec, "nodes": {"ids": [one.id]}})
    calls: dict[str, Callable[[], Any]] = {
        "empty": lambda: empty(return_state=True),
        "stage": lambda: flows.stage.stage(spec=parsed, return_state=True),
        "alone": lambda: flows.stage.stage(spec=alone, return_state=True),
    }
    found: dict[str, list[float]] = {name: [] for name in (*calls, "connect", "plan", "actors")}
    flows.stage.stage(spec=parsed)
    empty()
    for _ in range(runs):
        for name, call in calls.items():
            time.sleep(_SETTLE_SECONDS)  # Ray starts new workers in place of those that the last run used
            called = time.time()
            state = call()
            assert state.is_completed()
            found[name].append(state.timestamp.timestamp() - called)
        begin = time.perf_counter()
        with connected():
            found["connect"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            planned = plan_cluster(parsed, select_nodes(parsed.nodes), root=None)
            found["plan"].append(time.perf_counter() - begin)
            assert not planned.failed
            assert planned.fetch_bytes == 0
            time.sleep(_SETTLE_SECONDS)
            begin = time.perf_counter()
            _empty_actors([node.id for node in select_nodes(parsed.nodes)])
            found["actors"].append(time.perf_counter() - begin)
    return found


def _empty_actors(nodes: Sequence[str]) -> None:
    """What Ray itself takes to have a process of ours at work on each node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    class Empty:
        def answer(self) -> None:
            """Be there."""

    pins = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    actors = [Empty.options(scheduling_strategy=pin).remote() for pin in pins]  # type: ignore[attr-defined]
    ray.get([actor.answer.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)


if __name__ == "__main__":
    what, argument, *more = sys.argv[1:]
    print(json.dumps(plan(Path(argument)) if what == "plan" else stage(json.loads(argument), int(more[0]))))
