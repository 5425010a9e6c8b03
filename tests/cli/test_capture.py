"""`capture` and `prove` before anything is started: what is meant has to be clear."""

from __future__ import annotations

from pathlib import Path

import pytest

SERVE = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-cpu.yaml"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["capture", SERVE], "--to"),
        (["capture"], "SERVE_YAML"),
        (["capture", SERVE, "--to", "s3://b/c", "--label", "gpu"], "'gpu' is no label"),
        (["prove", SERVE, "--label", "=A10G"], "is no label: write --label KEY=VALUE"),
        (["prove", SERVE, "--deadline", "soon"], "--deadline"),
    ],
    ids=["no target", "no yaml", "no value", "no key", "no number"],
)
def test_a_slip_is_one_line(run, arguments, complaint):
    done = run(*arguments)
    assert done.code == 2
    assert complaint in done.err
    assert len(done.err.splitlines()) == 1
