"""A disk that is full, fills up at any step, or may only be read: one clear error, and all comes right with space."""

from __future__ import annotations

import os
import textwrap

import pytest

from tests.samples import make_published
from tests.small_disk import run_on_small_disk

pytestmark = pytest.mark.cloud

STEPS = ["resolve", "lock", "prepare", "transfer", "commit", "verify", "live", "sync"]


@pytest.fixture
def on_disk(tmp_path):
    """Run code where `disk` is a small file system of its own, `uri` an origin and `stage` stages it there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    uri = make_published(tmp_path / "origin", {"a": os.urandom(300_000), "b/c": os.urandom(100_000)}, 50_000)
    head = f"""
        import os, subprocess
        from pathlib import Path
        from llm_prefetch import ledger
        from llm_prefetch.errors import DiskError, DiskPermissionError, NoSpaceError, PrefetchError
        from llm_prefetch.live import check_deployment
        from llm_prefetch.record import records
        from llm_prefetch.stage import stage as stage_spec
        from llm_prefetch.store import open_store
        from llm_prefetch.verify import full_check
        from tests.samples import make_spec, no_record, raises, tree
        disk, origin = Path({str(disk)!r}), Path({str(tmp_path / "origin")!r})
        spec = make_spec({uri!r})

        def stage():
            return stage_spec(spec, open_store(disk / "store", create=True))

        def assert_right():
            store = open_store(disk / "store")
            assert check_deployment(store, "llama", full=True).ready
            files = tree(origin)
            files.pop(".llm-prefetch/manifest.json")
            assert tree(store.engine_path("llama", "weights").resolve()) == files

        def fill():
            with (disk / "filler").open("wb", buffering=0) as filler:
                try:
                    while filler.write(bytes(4096)):
                        pass
                except OSError:
                    pass
    """

    def run(code: str, *arguments: str, size: str = "4m") -> str:
        script = textwrap.dedent(head) + textwrap.dedent(code)
        return run_on_small_disk(disk, script, *arguments, size=size)

    return run


def test_a_disk_that_fills_up_at_any_step_is_told_and_harms_nothing(on_disk):
    out = on_disk(
        """
        import sys
        for name in sys.argv[1:]:
            subprocess.run(["rm", "-rf", disk / "store"], check=True)
            open_store(disk / "store", create=True)
            reached = []

            def observe(step):
                if step == name and not reached:
                    reached.append(step)
                    fill()

            ledger.observers.append(observe)
            outcome = "staged"
            try:
                stage()
            except PrefetchError as error:
                assert isinstance(error, NoSpaceError), repr(error)
                assert error.exit_code == 4 and error.where and error.hint
                outcome = error.code
            ledger.observers.remove(observe)
            assert reached, name
            store = open_store(disk / "store")
            for record in records(store):
                assert full_check(store, record.name, record.version).ready, name
            (disk / "filler").unlink()
            stage()
            assert_right()
            print(name, outcome)
        """,
        *STEPS,
    )
    print(out)
    outcomes = dict(line.split() for line in out.splitlines())
    assert list(outcomes) == STEPS
    assert {outcomes[step] for step in ("resolve", "lock", "prepare", "transfer")} == {"no-space"}


def test_a_disk_that_may_only_be_read_is_told_and_what_is_staged_still_serves(on_disk):
    out = on_disk(
        """
        other = "mount -o remount,{} " + str(disk)
        open_store(disk / "store", create=True)
        subprocess.run(other.format("ro"), shell=True, check=True)
        with raises(DiskPermissionError, 4, "Read-only file system", str(disk)):
            stage()
        subprocess.run(other.format("rw"), shell=True, check=True)
        stage()
        assert_right()
        subprocess.run(other.format("ro"), shell=True, check=True)
        assert_right()
        try:
            stage()
        except PrefetchError as error:
            assert isinstance(error, DiskPermissionError), repr(error)
        assert_right()
        print("done")
        """
    )
    assert out == "done\n"


@pytest.mark.parametrize(("state", "code"), [("ro", "disk-permission"), ("full", "no-space")])
def test_the_command_says_so_by_its_exit_code(on_disk, state, code):
    out = on_disk(
        f"""
        import json, sys
        open_store(disk / "store", create=True)
        if {state!r} == "ro":
            subprocess.run(f"mount -o remount,ro {{disk}}", shell=True, check=True)
        else:
            fill()
        (origin / "spec.json").write_text(spec.model_dump_json())
        command = [sys.executable, "-m", "llm_prefetch.cli", "stage", origin / "spec.json", "--root", disk / "store"]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True)
        assert done.returncode == 4, done
        *talk, line = done.stderr.splitlines()
        assert line.startswith("llm-prefetch: {code}: "), done.stderr
        assert str(disk) in line, line
        assert not any(other.startswith(("llm-prefetch:", "Traceback")) for other in talk), done.stderr
        print(json.loads(done.stdout)["error"]["code"])
        """
    )
    assert out == f"{code}\n"
