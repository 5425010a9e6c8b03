"""Power loss, as far as a running machine can play it: another boot in the journal and the records, tails of zeros.

What the kernel had not written to the disk is lost with the machine, and a file system gives back zeros for it. So a
record or a journal of another boot vouches for nothing until the bytes were read again; sealed ones do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llm_prefetch.live import check_deployment
from llm_prefetch.record import Verdict, records
from tests.crash.world import CHUNK, DEPLOYMENT, World, assert_done, store_of


def another_boot(root, *, zeros=()):
    """Everything that is not sealed is of another boot now, and the files end in zeros, as old as before."""
    for record in Path(root, "artifacts").glob("*/b3-*.json"):
        body = json.loads(record.read_bytes())
        body["boot"] = "another" if body["boot"] else ""
        record.write_text(json.dumps(body))
    for journal in Path(root, "partial").glob("*/journal"):
        journal.write_bytes(b"another\n" + journal.read_bytes().partition(b"\n")[2])
    for path in zeros:
        found = path.stat()
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.truncate(found.st_size // 2)
            file.truncate(found.st_size)
        path.chmod(0o444)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def unsealed(world: World, version):
    """A store that lost its power when `version` was live and not yet synced."""
    root = world.new_root()
    trail = world.trail(world.job(world.new_root(), version))
    steps = [line for line in trail if line.startswith("step")]
    assert world.stage(root, version, kill_step=steps.index("step sync") + 1).outcome == "killed"
    world.origin.take_ranges()
    return root


def files(root, name, suffix):
    return [path for path in Path(root, "artifacts", name).rglob(f"*{suffix}") if path.is_file()]


def test_what_was_not_synced_is_in_doubt_until_it_is_read(world: World):
    root = unsealed(world, world.one)
    another_boot(root)
    assert check_deployment(store_of(root), DEPLOYMENT).verdict is Verdict.STALE
    assert_done(world.stage(root, world.one))
    assert world.origin.take_ranges() == []
    world.assert_proven(root, world.one)


def test_a_full_check_settles_the_doubt(world: World):
    root = unsealed(world, world.one)
    another_boot(root)
    assert check_deployment(store_of(root), DEPLOYMENT, full=True).verdict is Verdict.HIT
    assert check_deployment(store_of(root), DEPLOYMENT).verdict is Verdict.HIT
    assert {record.boot for record in records(store_of(root))} == {""}


@pytest.mark.parametrize(("name", "suffix"), [("weights", "model-00001.safetensors"), ("compile", ".bin")])
def test_lost_bytes_are_found_and_fetched_again(world: World, name, suffix):
    root = unsealed(world, world.one)
    another_boot(root, zeros=files(root, name, suffix))
    assert check_deployment(store_of(root), DEPLOYMENT).verdict is Verdict.STALE
    assert check_deployment(store_of(root), DEPLOYMENT, full=True).verdict is Verdict.CORRUPT
    assert check_deployment(store_of(root), DEPLOYMENT).verdict is not Verdict.HIT
    assert_done(world.stage(root, world.one))
    assert {key.split("/")[1] for key, *_ in world.origin.take_ranges()} == {name}
    world.assert_proven(root, world.one)


def test_what_was_sealed_is_believed_after_a_reboot(world: World):
    root = world.prepared(world.one)
    another_boot(root)
    assert check_deployment(store_of(root), DEPLOYMENT).verdict is Verdict.HIT
    assert_done(world.stage(root, world.one))
    assert world.origin.take_ranges() == []


def test_a_journal_of_another_boot_is_read_again(world: World):
    """Half of the big file is zeros: its good chunks are kept, the lost ones are fetched."""
    root = world.new_root()
    trail = world.trail(world.job(world.new_root(), world.one))
    steps = [line for line in trail if line.startswith("step")]
    assert world.stage(root, world.one, kill_step=steps.index("step commit-rename") + 1).outcome == "killed"
    world.origin.take_ranges()
    big = next(Path(root, "partial").rglob("model-00001.safetensors"))
    another_boot(root, zeros=[big])
    world.assert_sound(root, None)
    assert_done(world.stage(root, world.one))
    weights = [(key, start) for key, start, _ in world.origin.take_ranges() if "weights" in key]
    half = big_size(world) // 2
    assert weights
    assert all(key.endswith(big.name) and start + CHUNK > half for key, start in weights)
    world.assert_proven(root, world.one)


def test_a_journal_that_is_all_zeros(world: World):
    root = world.prepared(world.one)
    assert world.stage(root, world.two, kill_bytes=world.two.bytes // 2).outcome == "killed"
    for journal in Path(root, "partial").glob("*/journal"):
        journal.write_bytes(bytes(journal.stat().st_size))
    world.assert_sound(root, world.one)
    world.assert_converges(root, world.two)


def big_size(world: World):
    return len(world.one.files["weights"]["model-00001.safetensors"])
