"""The nodes beside each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llm_prefetch.doctor import Outcome, healthy, store_findings
from llm_prefetch.doctor.machine import MachineFacts
from llm_prefetch.doctor.nodes import clock_finding, compare_nodes

GOOD = MachineFacts(
    host="gpu-1", clock=1000.0, root="/mnt/nvme/llm", store=True, file_system="xfs", free_bytes=500 * 10**9,
    total_bytes=1000 * 10**9, python="3.12.1",
    packages={"llm-prefetch": "0.1.0", "ray": "2.60.0", "vllm": "0.29.0", "torch": "2.13.0"},
)  # fmt: skip


def outcomes(**facts: MachineFacts) -> dict[str, str]:
    return {finding.about: str(finding.outcome) for finding in compare_nodes(facts)}


def test_equal_nodes_are_healthy() -> None:
    found = compare_nodes({"10.0.0.1": GOOD, "10.0.0.2": replace(GOOD, host="gpu-2")})
    assert healthy(found)
    assert {finding.outcome for finding in found} == {Outcome.OK}
    assert "500 of 1000 GB free on xfs" in found[0].says


def test_two_roots_fail_and_the_line_says_which_node_has_which() -> None:
    others = {f"10.0.0.{n}": GOOD for n in range(5)}
    found = compare_nodes({**others, "10.0.0.9": replace(GOOD, root="/home/ray/cache")})
    [finding] = [one for one in found if one.about == "root on all nodes"]
    assert finding.outcome is Outcome.FAILED
    assert (
        "/mnt/nvme/llm on 10.0.0.0, 10.0.0.1, 10.0.0.2 and 2 more; /home/ray/cache on 10.0.0.9"
        in finding.says
    )
    assert "LLM_PREFETCH_ROOT" in finding.mend


@pytest.mark.parametrize(
    ("package", "outcome"),
    [("llm-prefetch", "failed"), ("ray", "failed"), ("vllm", "warning"), ("torch", "warning")],
)
def test_two_versions_of_a_package_are_named(package: str, outcome: str) -> None:
    other = replace(GOOD, packages={**GOOD.packages, package: "9.9.9"})
    assert outcomes(a=GOOD, b=other)[f"{package} on all nodes"] == outcome
    without = replace(GOOD, packages={k: v for k, v in GOOD.packages.items() if k != package})
    [finding] = [
        one for one in compare_nodes({"a": GOOD, "b": without}) if one.about.startswith(f"{package} ")
    ]
    assert "none on b" in finding.says


def test_a_package_that_no_node_has_is_skipped() -> None:
    bare = replace(GOOD, packages={"llm-prefetch": "0.1.0"})
    assert outcomes(a=bare, b=bare)["vllm on all nodes"] == "skipped"
    assert outcomes(a=bare, b=replace(bare, python="3.11.0"))["python on all nodes"] == "failed"


@pytest.mark.parametrize(
    ("change", "outcome", "word"),
    [
        (
            {"trouble": "cannot write there: Permission denied", "mend": "give write access"},
            "failed",
            "Permission",
        ),
        ({"split": ("partial",)}, "failed", "partial"),
        ({"file_system": "nfs4"}, "warning", "nfs4"),
        ({"file_system": "tmpfs"}, "warning", "tmpfs"),
        ({"free_bytes": 10**9}, "warning", "1 of 1000 GB"),
        ({"store": False}, "ok", "nothing staged yet"),
    ],
)
def test_what_a_store_lies_on_is_judged(change: dict[str, object], outcome: str, word: str) -> None:
    [finding] = store_findings("10.0.0.1", replace(GOOD, **change))  # type: ignore[arg-type]
    assert (str(finding.outcome), finding.about) == (outcome, "store on 10.0.0.1")
    assert word in finding.says
    assert bool(finding.mend) == (outcome != "ok")


@pytest.mark.parametrize(
    ("clock", "outcome"),
    [(1000.0, "ok"), (1004.9, "ok"), (998.5, "ok"), (1010.0, "warning"), (990.0, "warning")],
)
def test_a_clock_is_wrong_only_beyond_the_time_that_the_question_took(clock: float, outcome: str) -> None:
    finding = clock_finding("gpu-1", clock, 1000.0, 1003.0)
    assert str(finding.outcome) == outcome
    if outcome == "warning":
        assert ("7 s ahead" if clock > 1003 else "10 s behind") in finding.says
