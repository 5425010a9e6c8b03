"""SIGKILL while staging: the old state or the new one, no torn state that looks whole, and no work done twice."""

from __future__ import annotations

import random
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.crash.child import Job
from tests.crash.world import CHUNK, CONCURRENCY, World, assert_done

_PACKAGE = Path(__file__).parents[2] / "llm_prefetch"


def steps_of(trail):
    return [line.removeprefix("step ") for line in trail if line.startswith("step ")]


def test_the_clean_runs_take_every_step_that_the_code_names(world: World):
    root = world.prepared(world.one)
    seen = set(steps_of(world.trail(world.job(root, world.two))))
    named = {
        name
        for module in _PACKAGE.glob("*.py")
        for name in re.findall(r'\b(?:mark|step)\(\s*"([\w-]+)"', module.read_text())
    }
    # Steps of specs with plugins or compile caches, and of full disks: their kills are in tests of their own.
    assert named - {"preflight", "install", "evict"} <= seen


def test_killed_at_each_step_of_the_first_staging(world: World):
    steps = steps_of(world.trail(world.job(world.new_root(), world.one)))
    for number, name in enumerate(steps, 1):
        root = world.new_root()
        assert world.stage(root, world.one, kill_step=number).outcome == "killed", name
        world.assert_sound(root, None, world.one)
        world.assert_converges(root, world.one)


def test_killed_at_each_step_of_the_next_version(world: World):
    steps = steps_of(world.trail(world.job(world.prepared(world.one), world.two)))
    for number, name in enumerate(steps, 1):
        root = world.prepared(world.one)
        assert world.stage(root, world.two, kill_step=number).outcome == "killed", name
        world.assert_sound(root, world.one, world.two)
        world.assert_converges(root, world.two)


def test_killed_before_each_change_to_the_file_system(world: World):
    world = world.small
    changes = len(
        [line for line in world.trail(world.job(world.prepared(world.one), world.two)) if "change" in line]
    )
    for number in range(1, changes + 1):
        root = world.prepared(world.one)
        killed = world.stage(root, world.two, kill_change=number).outcome == "killed"
        assert killed or number > changes - 2 * CONCURRENCY  # workers share descriptors, so the count varies
        world.assert_sound(root, world.one, world.two)
        world.assert_converges(root, world.two)


@pytest.mark.parametrize("seed", range(8))
def test_killed_while_bytes_arrive(world: World, seed):
    root = world.prepared(world.one)
    at = random.Random(seed).randrange(1, world.two.bytes)
    assert world.stage(root, world.two, kill_bytes=at).outcome == "killed"
    before = world.origin.take_ranges()
    world.assert_sound(root, world.one)
    assert_done(world.stage(root, world.two))
    after = world.origin.take_ranges()
    assert sum(length for *_, length in before + after) <= world.two.bytes + CONCURRENCY * CHUNK
    world.assert_proven(root, world.two)


@pytest.mark.parametrize("entry", [1, 2, 7, 13, 16])
def test_killed_while_writing_an_entry_of_the_journal(world: World, entry):
    root = world.prepared(world.one)
    assert world.stage(root, world.two, kill_entry=entry).outcome == "killed"
    world.assert_sound(root, world.one)
    world.assert_converges(root, world.two)


def test_killed_again_and_again(world: World):
    root, rng = world.prepared(world.one), random.Random(5)
    kills = 0
    while world.stage(root, world.two, kill_bytes=rng.randrange(1, 3 * CHUNK)).outcome == "killed":
        world.assert_sound(root, world.one, world.two)
        kills += 1
        assert kills < 100
    asked = sum(length for *_, length in world.origin.take_ranges())
    assert asked <= world.two.bytes + kills * CONCURRENCY * CHUNK
    world.assert_proven(root, world.two)


def test_killed_from_outside_at_100_random_moments(world: World):
    rng = random.Random(7)
    begin = time.monotonic()
    world.assert_converges(world.prepared(world.one), world.two)
    longest = time.monotonic() - begin  # of a whole staging and its full check
    kills = tries = 0
    while kills < 100:
        root = world.prepared(world.one)
        result = world.stage(root, world.two, kill_after=rng.uniform(0, longest))
        assert result.outcome in {"killed", "done"}
        world.assert_sound(root, world.one, world.two)
        world.assert_converges(root, world.two)
        shutil.rmtree(root)
        kills += result.outcome == "killed"
        longest *= 1.02 if result.outcome == "killed" else 0.9  # so that most are killed, and early and late
        tries += 1
        assert tries < 1000


def test_killed_at_each_step_and_change_of_a_rollback(world: World):
    def two_then(**how):
        root = world.prepared(world.one)
        assert_done(world.stage(root, world.two))
        return root, Job(root, "rollback", world.two.spec, **how)

    trail = world.trail(two_then()[1])
    kinds = {"kill_step": "step", "kill_change": "change"}
    for how, number in [
        (how, n) for how, kind in kinds.items() for n, _ in enumerate((t for t in trail if kind in t), 1)
    ]:
        root, job = two_then(**{how: number})
        assert world.run(job)[0].outcome == "killed"
        world.assert_sound(root, world.one, world.two)
        if world.live_version(root) is world.two:
            assert_done(*world.run(Job(root, "rollback", world.two.spec)))
        world.assert_proven(root, world.one)


def test_a_rollback_after_a_kill_finds_the_generation_that_was_live_before(world: World):
    """Killed after the switch, before the ledger has its row, then a third generation."""
    third = {**world.one.spec, "artifacts": world.one.spec["artifacts"][:1]}
    root = world.prepared(world.one)
    assert world.stage(root, world.two, kill_path="/ledger.jsonl").outcome == "killed"
    assert world.live_version(root) is world.two
    assert_done(*world.run(Job(root, "stage", third)))
    assert_done(*world.run(Job(root, "rollback", third)))
    assert world.live_version(root) is world.two
