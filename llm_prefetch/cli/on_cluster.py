"""What `--cluster` means for a command: the module that knows Ray, connected, with its talk out of the way."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType

from llm_prefetch.errors import MissingExtraError


def add_options(parser: argparse.ArgumentParser, nodes: str) -> None:
    """Add `--cluster`, which means these `nodes`, and `--address`."""
    parser.add_argument("--cluster", action="store_true", help=f"{nodes}, not this one")
    parser.add_argument(
        "--address", help="address of the Ray cluster (else RAY_ADDRESS, else the one on this machine)"
    )


@contextmanager
def on_cluster(address: str | None) -> Iterator[ModuleType]:
    """The package `llm_prefetch.cluster`, connected to the cluster at `address`.

    Ray's threads print news of the cluster on stdout, where a program reads our answer: it becomes talk.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: there is no cluster.
    """
    cluster = _cluster()
    with redirect_stdout(sys.stderr), cluster.connected(address):
        yield cluster


def _cluster() -> ModuleType:
    """Importing Ray takes a second, and it need not be installed."""
    try:
        from llm_prefetch import cluster
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise MissingExtraError(
            "--cluster needs Ray", where="this Python", hint="pip install 'llm-prefetch[ray]'"
        ) from error
    return cluster
