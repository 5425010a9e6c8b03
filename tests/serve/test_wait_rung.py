"""The rung `wait`: a staging in progress on this node is waited for, as long as its process lives."""

from __future__ import annotations

import logging

import pytest

from tests.serve.conftest import during, go_on, row, stager


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="ray.serve.llm_prefetch")
    return caplog


def test_where_nobody_stages_wait_is_over_at_once(make, store, rows):
    start = make(on_miss=["wait", "ray"])
    start.run()
    assert start.by_ray
    verdict, rung, [waited, _] = row(rows)
    assert (verdict, rung, waited) == ("MISSING", "ray", "no staging is in progress on this node")


def test_a_replica_waits_for_the_staging_in_progress_and_starts_from_what_it_made(make, store, spec, rows):
    start = make(on_miss=["wait", "fail"])
    with stager(store, spec) as process:
        during(start, lambda: go_on(process))
        # It is live while the other process still works on it: nobody waits for its last sync.
        assert process.poll() is None
    assert start.engine.hf_model_id == str(store.root / "live" / "llama" / "weights")
    assert row(rows) == ("MISSING", "wait", ["the staging has made the node ready"])


def test_when_the_staging_process_dies_those_who_wait_go_on(make, store, spec, rows):
    start = make(on_miss=["wait", "ray"])
    with stager(store, spec) as process:
        during(start, process.kill)
    assert start.by_ray
    assert row(rows)[2][0] == "the staging has ended"


def test_wait_ends_at_its_deadline(make, store, spec, rows, log):
    start = make(on_miss=["wait", "ray"], deadlines={"wait": 0.5})
    with stager(store, spec):
        start.run()
    assert start.by_ray
    assert row(rows)[2][0].startswith(
        "gave up after 0.5 s: another process stages llama on this node: 0 bytes are in work"
    )


def test_a_staging_of_another_deployment_is_not_waited_for(make, store, spec, rows):
    start = make(deployment="other", on_miss=["wait", "ray"])
    with stager(store, spec):
        start.run()
    assert row(rows)[2][0] == "no staging is in progress on this node"
