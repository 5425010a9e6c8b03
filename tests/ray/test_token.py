"""A cluster that asks for a token, as Ray's do by default from 2.61 on."""

from __future__ import annotations

import json
import sys

import pytest

from tests.real.hosts import HostSpec, hosts

pytestmark = pytest.mark.ray

SPEC = {"deployment": "llama", "artifacts": [{"name": "weights", "uri": "file:///nowhere"}]}


def test_a_token_that_is_wrong_or_missing_is_one_clear_line_in_seconds() -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "right" * 8}
    cases = {
        "right": ({}, "no such folder"),
        "wrong": (
            {"RAY_AUTH_TOKEN": "wrong" * 8},
            "the Ray cluster asks for a token, and ours is missing or wrong",
        ),
        "missing": ({"RAY_AUTH_TOKEN": ""}, "the Ray cluster asks for a token, and ours is missing or wrong"),
        "unknown to us": ({"RAY_AUTH_MODE": "disabled"}, "the Ray cluster asks for a token"),
    }
    argv = [sys.executable, "-m", "llm_prefetch.cli", "stage", "--cluster", "-"]
    with hosts(1, spec=HostSpec(num_cpus=0), dashboard=False, env=token) as cluster:
        for case, (env, said) in cases.items():
            done = cluster.head.run(argv, env=env, check=False, stdin=json.dumps(SPEC))
            last = done.stderr.splitlines()[-1]
            assert done.returncode == 3, (case, done.stderr)
            assert said in last, case
            assert case == "right" or ("RAY_AUTH_TOKEN" in last and cluster.address in last)
            assert "InvalidAuthToken" not in done.stderr, case  # Ray did not try on for 20 s
            assert "wrong" * 8 not in done.stderr
