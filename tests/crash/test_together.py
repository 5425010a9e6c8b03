"""Several processes at once, one store: one does the work, and a lock that locks nothing costs work, never a byte."""

from __future__ import annotations

import random

import pytest

from llm_prefetch.live import check_deployment
from llm_prefetch.record import records
from tests.crash.world import CHUNK, CONCURRENCY, DEPLOYMENT, World, assert_done, store_of


@pytest.mark.parametrize("processes", [2, 8])
def test_the_same_version_is_fetched_once(world: World, processes):
    root = world.new_root()
    world.origin.take_ranges()
    assert_done(*world.run(*[world.job(root, world.one)] * processes))
    assert sum(length for *_, length in world.origin.take_ranges()) == world.one.bytes
    world.assert_proven(root, world.one)


def test_who_waits_takes_over_from_who_is_killed(world: World):
    root = world.prepared(world.one)
    first = world.job(root, world.two, kill_bytes=world.two.bytes // 2)
    results = world.run(first, world.job(root, world.two, delay=0.01))
    assert results[1].outcome == "done"
    asked = sum(length for *_, length in world.origin.take_ranges())
    assert asked <= world.two.bytes + CONCURRENCY * CHUNK
    world.assert_proven(root, world.two)


@pytest.mark.parametrize("seed", range(4))
def test_two_versions_for_one_deployment(world: World, seed):
    rng = random.Random(seed)
    root = world.new_root()
    jobs = [world.job(root, version, delay=rng.uniform(0, 0.03)) for version in (world.one, world.two)]
    assert_done(*world.run(*jobs))
    world.assert_sound(root, world.one, world.two)
    assert len(list(records(store_of(root)))) == 4
    for version in (world.one, world.two):
        world.assert_converges(root, version)


@pytest.mark.parametrize("seed", range(10))
def test_locks_that_lock_nothing(world: World, seed):
    """A staging may lose to another one and say so; none makes a wrong byte count, and the next one is ready."""
    rng = random.Random(seed)
    root = world.new_root()
    spread = rng.choice([0, 0.005, 0.02, 0.06])
    processes = rng.choice([2, 4])
    jobs = [
        world.job(root, world.one, blind_locks=True, delay=rng.uniform(0, spread)) for _ in range(processes)
    ]
    results = world.run(*jobs)
    assert [result for result in results if result.outcome == "crash"] == []
    world.assert_sound(root, None, world.one)
    assert_done(world.stage(root, world.one, blind_locks=True))
    world.assert_proven(root, world.one)


@pytest.mark.parametrize("seed", range(6))
def test_locks_that_lock_nothing_and_a_kill(world: World, seed):
    rng = random.Random(seed)
    root = world.prepared(world.one)
    dies = world.job(root, world.two, blind_locks=True, kill_change=rng.randrange(20, 90))
    lives = world.job(root, world.two, blind_locks=True, delay=rng.uniform(0, 0.02))
    world.run(dies, lives)
    world.assert_sound(root, world.one, world.two, None)
    assert_done(world.stage(root, world.two, blind_locks=True))
    assert check_deployment(store_of(root), DEPLOYMENT, full=True).ready
    world.assert_proven(root, world.two)
