"""`capture` and `prove`: one replica more, to build the compile cache of a deployment, or to see that it is found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from llm_prefetch.cli.display import print_json, print_table, say
from llm_prefetch.cli.on_cluster import on_cluster
from llm_prefetch.errors import UsageError
from llm_prefetch.progress import size
from llm_prefetch.signatures import load_signing_key
from llm_prefetch.spec import NodeSelector

_DESCRIPTION = """\
Start one replica more of an application, through Ray Serve, from the LLMConfig in SERVE_YAML, on a node that has its
model staged. When its engine is up, publish what vLLM has compiled as an artifact, and take the replica down again.
No other application is touched. Prints the artifact with its version, for the SPEC."""
_EXAMPLE = """\
example:
  llm-prefetch capture serve.yaml --to s3://bucket/caches/llama-3-8b-a10g --label ray.io/accelerator-type=A10G"""


_PROVE = """\
Start one replica of an application, through Ray Serve, from the LLMConfig in SERVE_YAML, on one node of each kind that
has it staged, and see whether its engine finds the compile cache. The answer is kept in the ledger of every node that
it holds for. Exit code 1 if a cache was missed."""
_COLUMNS = ("booted on", "nodes", "outcome", "init s", "reason")


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `capture` and `prove`."""
    parser = commands.add_parser(
        "capture",
        parents=parents,
        help="build the compile cache of a deployment, and publish it",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    _add_launch(parser)
    parser.add_argument("--to", metavar="URI", required=True, help="where the artifact goes")
    parser.add_argument("--dry-run", action="store_true", help="choose a node; start nothing")
    parser.add_argument(
        "--sign",
        metavar="KEYFILE",
        type=Path,
        help="sign the artifact with this private key, which stays here",
    )
    parser.set_defaults(run=_capture)
    prover = commands.add_parser(
        "prove",
        parents=parents,
        help="boot the engine once on each kind of node: does it find the cache?",
        description=_PROVE,
    )
    _add_launch(prover)
    prover.set_defaults(run=_prove)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    """What says which replica is started, and where."""
    parser.add_argument("serve_yaml", metavar="SERVE_YAML", type=Path, help="what `serve deploy` is given")
    parser.add_argument("--app", metavar="NAME", default="", help="the application, if there are several")
    parser.add_argument("--model", metavar="ID", default="", help="the model_id, if there are several")
    parser.add_argument(
        "--label", metavar="KEY=VALUE", action="append", default=[], help="only on nodes with this Ray label"
    )
    parser.add_argument(
        "--node",
        metavar="NODE",
        action="append",
        default=[],
        help="only on this node: id, address or host name",
    )
    parser.add_argument(
        "--address", help="address of the Ray cluster (else RAY_ADDRESS, else the one on this machine)"
    )
    parser.add_argument(
        "--deadline", metavar="SECONDS", type=float, default=1800.0, help="for the replica's start (1800)"
    )


def _selector(options: argparse.Namespace) -> NodeSelector:
    """The nodes that are meant.

    Raises:
        UsageError: a label is not one.
    """
    pairs = [label.partition("=") for label in options.label]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise UsageError(f"{key!r} is no label", hint="write --label KEY=VALUE")
    return NodeSelector(labels={key: value for key, _, value in pairs}, ids=options.node)


def _capture(options: argparse.Namespace) -> int:
    nodes = _selector(options)
    key = load_signing_key(options.sign) if options.sign else None
    with on_cluster(options.address):
        from llm_prefetch.capturing.capture import capture
        from llm_prefetch.capturing.launch import read_launch

        launch = read_launch(options.serve_yaml, options.app, options.model)
        report = capture(
            launch, options.to, nodes=nodes, root=options.root, seconds=options.deadline,
            stop=options.stop, say=say, dry_run=options.dry_run, key=key,
        )  # fmt: skip
    if options.json:
        print_json(report.facts())
    elif report.captured is None:
        print(f"would start a replica of {report.deployment} on {report.node} and publish to {report.uri}")
    else:
        _print(report.captured.families, report.artifact, report.captured.published.bytes, report.signed_by)
    return 0


def _prove(options: argparse.Namespace) -> int:
    nodes = _selector(options)
    with on_cluster(options.address):
        from llm_prefetch.capturing.launch import read_launch
        from llm_prefetch.capturing.prove import prove

        launch = read_launch(options.serve_yaml, options.app, options.model)
        proven = prove(
            launch, nodes=nodes, root=options.root, seconds=options.deadline, stop=options.stop, say=say
        )
    if options.json:
        print_json({"deployment": launch.deployment, "proven": proven})
    else:
        print_table(_COLUMNS, (tuple(map(str, one.row().values())) for one in proven))
    return 0 if all(one.proof.used for one in proven) else 1


def _print(
    families: dict[str, tuple[int, int]], artifact: dict[str, str], total: int, signed_by: str
) -> None:
    for name, (files, count) in families.items():
        say(f"  {name}: {files} files, {size(count)}")
    signed = f", signed by {signed_by}" if signed_by else ""
    say(f"published {size(total)}{signed}; add to the artifacts of the SPEC:")
    print(f"- {json.dumps(artifact)}")
