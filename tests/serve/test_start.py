"""What one start of a replica writes into its node's ledger."""

from __future__ import annotations

import pytest

from llm_prefetch.live import DeploymentCheck
from llm_prefetch.record import Verdict
from llm_prefetch.serve.options import parse_options
from llm_prefetch.serve.start import Start

LOST = DeploymentCheck("llama", "", Verdict.MISSING, "the node did not answer", (), ())


@pytest.mark.parametrize("looked", [False, True])
def test_a_node_whose_check_never_ran_has_its_row(staged, rows, looked):
    start = Start(parse_options({"deployment": "llama"}), "replica-7")
    if looked:
        assert start.peek()
    start.record(LOST, "", "ray", (), role="worker")
    start.end_as_worker("ready")
    [row] = rows("start")
    assert (row["reason"], row["rung"], row["seconds"]) == (LOST.reason, "ray", 0.0)
    assert [row["outcome"] for row in rows("engine")] == ["ready"]


def test_a_node_without_a_store_has_no_ledger_and_that_is_no_error(store, rows):
    (store.root / "LAYOUT").unlink()
    start = Start(parse_options({"deployment": "llama"}), "replica-7")
    start.record(LOST, "", "ray", ())
    assert rows("start") == []
