"""`make demo`: the main job from end to end, on this machine, with nothing faked.

A real model goes into a real S3 API; a real Prefect flow stages it on every host of a real Ray cluster; a real
Ray Serve LLM replica on a real vLLM engine starts from the staged files and answers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.real.checkpoint import write_checkpoint
from tests.real.hosts import HostSpec
from tests.real.serve_app import chat, serve_llm
from tests.real.world import World, orchestrated, world

_YAML = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-cpu.yaml"
_SAYS = "I was staged before anyone scheduled me."


def main() -> None:
    """Run every step and say what it does and how long it takes."""
    began = time.monotonic()
    engine = importlib.util.find_spec("vllm") is not None
    if not engine:
        print("vLLM's CPU build is not installed: everything up to the engine is shown.\n")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llm-prefetch-demo-")))
        with step("generate a small Llama: weights in three shards, tokenizer, chat template"):
            model = write_checkpoint(folder / "tiny-llama", says=_SAYS)
            print(
                f"     {sum(f.stat().st_size for f in model.iterdir()) / 1e6:.1f} MB in {len(list(model.iterdir()))} files"
            )
        with step("start three hosts, each with its network and disk, one Ray cluster, and an S3 API"):
            around = stack.enter_context(world(3, each={1: HostSpec(num_cpus=4)}, spec=HostSpec(num_cpus=0)))
        with step("publish the model to s3://models/tiny-llama, with its manifest"):
            around.s3.create_bucket("models")
            show(around.cli(around.head, "publish", model, "s3://models/tiny-llama")[1])
        with step("start a Prefect server, `prefect deploy --all`, and a worker on the head"):
            prefect = stack.enter_context(orchestrated(around))
        around.s3.forget()
        with step("`prefect deployment run stage/tiny-llama`: stage on every host"):
            prefect.run("stage/tiny-llama")
            for host in around.cluster.hosts:
                (row,) = [row for row in around.ledger(host) if row["kind"] == "stage"]
                fetched = sum(artifact["fetched"] for artifact in row["artifacts"])
                print(
                    f"     {host.name}: {row['outcome']}, {fetched / 1e6:.1f} MB fetched in {row['seconds']:.2f} s"
                )
            print(f"     {around.s3.bytes_read() / 1e6:.1f} MB were read from S3 in all")
        with step("`llm-prefetch verify --full` on every host"):
            for host in around.cluster.hosts:
                show(around.cli(host, "verify", "tiny-llama", "--full")[1], label=host.name)
        if engine:
            start_replica(around)
    print(f"\ndone in {time.monotonic() - began:.0f} s")


def start_replica(around: World) -> None:
    """Serve the model on the one host that has CPUs, ask it, and print the ledger of the start."""
    around.s3.forget()
    with contextlib.ExitStack() as stack:
        with step(
            "deploy the Serve YAML: a replica on vLLM, through our callback (a minute or more on two cores)"
        ):
            app = stack.enter_context(
                serve_llm(
                    _YAML,
                    dashboard=around.cluster.dashboard_url,
                    host=around.head.ip,
                    temp_dirs=[host.folder / "ray" for host in around.cluster.hosts],
                )
            )
            print(f"     {around.s3.bytes_read()} bytes were read from S3 by the start")
        with step("POST /v1/chat/completions"):
            answer = chat(app.base_url, "tiny-llama", "Where do you come from?")
            print(f"     {answer['choices'][0]['message']['content']!r}")
        with step("the ledger of that start"):
            for row in around.ledger(around.cluster.hosts[1]):
                if row["kind"] == "start":
                    print(
                        f"     {row['verdict']}, checked in {row['seconds'] * 1000:.1f} ms, rung {row['rung']}, {row['bundle'][:19]}"
                    )
                elif row["kind"] == "engine":
                    print(f"     engine {row['outcome']} {row['seconds']:.1f} s after the check")


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is done, then how long it took."""
    print(f"==> {what}", flush=True)
    began = time.monotonic()
    yield
    print(f"    {time.monotonic() - began:.1f} s\n", flush=True)


def show(output: str, *, label: str = "") -> None:
    """Print a command's output, indented."""
    for line in output.strip().splitlines():
        print(f"     {label}: {line}" if label else f"     {line}")


if __name__ == "__main__":
    sys.exit(main())
