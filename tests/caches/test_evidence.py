"""Hit, partial hit, miss or nothing to find: from what real starts on the CPU engine left, and from a GPU's log lines.

`samples/cpu-*.txt` and `.tree` are those of four starts of `deployments/serve/tiny-llama-cpu.yaml` without
`enforce_eager`: cold, warm on the same node, on another node that the cache was copied to, and with other arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_prefetch.caches.evidence import GRAPHS, LINES, Before, Evidence, Outcome, judge, look

SAMPLES = Path(__file__).parent / "samples"
KEY = "b3eb49a359fe2b71d35766c84cb63594f6d2d8508daa8d4e2ff02b88de8af4ef"
OTHER = "c1cb8997859b2e81302bd35be74dad1f189fe9781bc6c85bbb4dbeee63c635ba"
BEGAN = {
    "cpu-cold": 1795247809.0,
    "cpu-warm": 1795247931.8,
    "cpu-shipped": 1795247989.3,
    "cpu-other-argument": 1795248076.0,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "vllm"


@pytest.fixture
def left(root: Path) -> Callable[..., Evidence]:
    """What a real start has left below `root`, judged; `lines` of its log, all by default."""

    def left(sample: str, had: set[str], lines: list[str] | None = None) -> Evidence:
        for row in (SAMPLES / f"{sample}.tree").read_text().splitlines():
            moment, _, path = row.split(maxsplit=2)
            if not path.startswith("TMP/"):
                put(root / path, float(moment))
        log = (SAMPLES / f"{sample}.txt").read_text().splitlines() if lines is None else lines
        return judge(Before(root, BEGAN[sample], frozenset(had), frozenset()), log)

    return left


def put(path: Path, moment: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    os.utime(path, (moment, moment))


def test_a_cold_start_finds_nothing_as_there_was_nothing_to_find(left):
    found = left("cpu-cold", set())
    assert (found.outcome, found.used) == (Outcome.NONE, False)
    assert (found.keys, found.new_keys) == ((KEY,), (KEY,))
    assert (found.compiled, found.kernels, found.new_kernels) == (1, 0, 14)
    assert found.init_seconds == 29.13


@pytest.mark.parametrize("sample", ["cpu-warm", "cpu-shipped"])
def test_on_cpus_a_warm_start_compiles_the_graph_again_but_no_kernel(left, sample):
    """vLLM's CPU build saves the compiled graph and cannot load it; the kernels beside it do their work."""
    found = left(sample, {KEY})
    assert (found.outcome, found.used) == (Outcome.PARTIAL, True)
    assert (found.new_keys, found.compiled, found.kernels, found.new_kernels) == ((), 1, 14, 0)
    assert "all kernels were there: 'function' object has no attribute 'finalize_loading'" in found.reason


def test_a_changed_argument_is_another_key_and_a_miss(left):
    found = left("cpu-other-argument", {KEY})
    assert (found.outcome, found.used) == (Outcome.MISS, False)
    assert (found.keys, found.new_keys, found.new_kernels) == ((OTHER,), (OTHER,), 14)
    assert found.reason == "the engine's key is c1cb899785; the cache has b3eb49a359"


@pytest.mark.parametrize(
    ("sample", "had", "outcome"),
    [
        ("cpu-cold", set(), Outcome.NONE),
        ("cpu-warm", {KEY}, Outcome.PARTIAL),
        ("cpu-shipped", {KEY}, Outcome.PARTIAL),
        ("cpu-other-argument", {KEY}, Outcome.MISS),
    ],
)
def test_without_any_log_the_folders_alone_say_the_same(left, sample, had, outcome):
    assert left(sample, had, lines=[]).outcome is outcome


# vLLM 0.29 on GPUs, which this machine has not: the strings of `compilation/decorators.py` and of `monitor.py`.
def loaded(rank: int, key: str = KEY) -> str:
    return (
        f"(RayWorkerProc pid=9) INFO 11-21 05:14:14 [decorators.py:314] Directly load AOT compilation from path "
        f"/store/caches/m/{GRAPHS}/{key}/rank_{rank}_0/model"
    )


def refused(rank: int, reason: str) -> str:
    return (
        f"(RayWorkerProc pid=9) WARNING 11-21 05:14:14 [decorators.py:324] Compiling model again due to a load failure "
        f"from /store/caches/m/{GRAPHS}/{KEY}/rank_{rank}_0/model, reason: {reason}"
    )


def saved(rank: int, key: str = KEY) -> str:
    return (
        f"(RayWorkerProc pid=9) [backbone] INFO 11-21 05:14:40 [decorators.py:720] saved AOT compiled function to "
        f"/store/caches/m/{GRAPHS}/{key}/rank_{rank}_0/model"
    )


COMPILE = "INFO 11-21 05:14:40 [monitor.py:20] torch.compile took 2.31 s in total"
INIT = (
    "INFO 11-21 05:15:05 [core.py:362] init engine (profile, create kv cache, warmup model) took 12.80 s "
    "(compilation: 2.44 s)"
)


def judged(
    root: Path, *lines: str, had: tuple[str, ...] = (KEY,), staged: tuple[str, ...] | None = (KEY,)
) -> Evidence:
    return judge(Before(root, 0.0, frozenset(had), frozenset()), lines, staged=staged)


def test_on_gpus_it_is_a_hit_when_each_rank_has_loaded_its_graph(root):
    found = judged(root, loaded(0), loaded(1), COMPILE, INIT)
    assert (found.outcome, found.loaded, found.compiled) == (Outcome.HIT, 2, 0)
    assert (found.compile_seconds, found.init_seconds) == (2.44, 12.8)
    assert found.used


def test_a_rank_that_compiles_again_makes_it_a_partial_hit_with_vllms_reason(root):
    found = judged(
        root, loaded(0), refused(1, "Source code has changed since the last compilation."), saved(1)
    )
    assert (found.outcome, found.loaded, found.compiled) == (Outcome.PARTIAL, 1, 1)
    assert found.reason.startswith("1 of 2 graphs were loaded")
    assert found.reason.endswith("Source code has changed since the last compilation.")


def test_a_graph_that_cannot_be_saved_was_compiled_nevertheless(root):
    line = f"unable to save AOT compiled function to /c/{GRAPHS}/{KEY}/rank_0_0/model: disk full"
    assert judged(root, line).outcome is Outcome.PARTIAL


def test_a_staged_cache_that_the_engine_was_not_given_is_a_miss_too(root):
    assert judged(root, saved(0), had=(), staged=()).outcome is Outcome.MISS
    assert judged(root, saved(0), had=(), staged=None).outcome is Outcome.NONE


def test_what_an_earlier_start_has_compiled_here_does_not_make_the_staged_cache_a_hit(root):
    found = judged(root, loaded(0, OTHER), had=(KEY, OTHER))
    assert (found.outcome, found.loaded, found.used) == (Outcome.MISS, 1, False)
    assert found.reason.endswith("an earlier start on this node has compiled for that key")
    assert judged(root, loaded(0, OTHER), had=(OTHER,), staged=None).outcome is Outcome.HIT


def test_an_engine_that_compiles_nothing_has_no_use_for_a_cache(root):
    assert judged(root, INIT).outcome is Outcome.NONE
    assert judged(root).keys == ()


def test_new_kernels_in_a_known_folder_are_told_apart_from_those_that_were_there(root):
    kernels = root / GRAPHS / KEY / "inductor_cache"
    put(kernels / "ab" / "cab.so", 10.0)
    put(kernels / "triton" / "0" / "K" / "kernel.cubin", 200.0)
    put(kernels / "aotautograd" / "note", 200.0)
    found = judge(Before(root, 100.0, frozenset({KEY}), frozenset()), [refused(0, "corrupted"), saved(0)])
    assert (found.outcome, found.kernels, found.new_kernels) == (Outcome.PARTIAL, 1, 1)
    assert not found.used


def test_looking_at_a_cache_sees_its_keys_and_the_folders_of_the_piecewise_backend(root):
    assert look(root).keys == frozenset()
    (root / GRAPHS / KEY).mkdir(parents=True)
    (root / "torch_compile_cache" / "0123456789" / "rank_0_0").mkdir(parents=True)
    before = look(root)
    assert (before.keys, before.pieces) == ({KEY}, {"0123456789"})


def test_the_lines_that_are_looked_for_are_those_that_the_samples_have():
    text = "".join(path.read_text() for path in SAMPLES.glob("*.txt")) + loaded(0) + COMPILE
    seldom = {"unable to save AOT compiled function to "}
    assert [line for line in LINES if line not in text] == [*seldom]
