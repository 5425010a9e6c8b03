"""Starts and stagings as the ledger's rows tell them, whole or not, and the page that draws them."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from llm_prefetch import ledger
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.timeline import UNFINISHED, Phase, compare, exactly, read_stagings, read_starts
from llm_prefetch.waterfall import draw
from tests.samples import TOTAL, make_published

PHASES = [
    {"phase": "schedule", "at": -2.0, "seconds": 2.0, "within": 0.001, "source": "ray log"},
    {"phase": "imports", "at": 0.0, "seconds": 10.0, "within": 0.001, "source": "ray log"},
    {"phase": "verify", "at": 10.0, "seconds": 0.002, "within": 0.0, "source": "clock"},
    {"phase": "weights", "at": 10.002, "seconds": 20.0, "within": 1.0, "source": "vllm log"},
    {"phase": "warm-up", "at": 30.002, "seconds": 1.0, "within": 1.0, "source": "vllm log"},
    {"phase": "compile", "at": 31.002, "seconds": 5.0, "within": 0.0, "source": "vllm log"},
    {"phase": "warm-up", "at": 36.002, "seconds": 2.0, "within": 1.0, "source": "vllm log"},
]


def begun(name="a1", **more):
    row = {
        "kind": "start",
        "at": 1000.0,
        "start": name,
        "replica": "r",
        "deployment": "llama",
        "bundle": "bundle-1",
    }
    return {**row, "verdict": "HIT", "reason": "", "rung": "hit", "seconds": 0.002, "ladder": [], **more}


def ended(name="a1", **more):
    return {
        "kind": "engine",
        "at": 1040.0,
        "start": name,
        "outcome": "ready",
        "seconds": 28.0,
        "phases": PHASES,
        **more,
    }


def test_the_check_and_the_end_of_a_start_are_one_start():
    [start] = read_starts([begun(), ended()])
    assert (start.id, start.deployment, start.verdict, start.rung) == ("a1", "llama", "HIT", "hit")
    assert start.outcome == "ready"
    assert [phase.name for phase in start.phases] == [row["phase"] for row in PHASES]
    assert start.phases[0].at == -2.0


def test_the_seconds_of_a_start_are_those_since_its_process_began_as_not_every_node_knows_more():
    [start] = read_starts([begun(), ended()])
    assert start.seconds == pytest.approx(38.002)


def test_starts_that_overlap_are_told_apart():
    starts = read_starts([begun("a"), begun("b", rung="ray"), ended("b", outcome="failed: no"), ended("a")])
    assert [(start.id, start.rung, start.outcome) for start in starts] == [
        ("a", "hit", "ready"),
        ("b", "ray", "failed: no"),
    ]


def test_a_start_that_was_killed_is_unfinished_and_what_it_took_unknown():
    [start] = read_starts([begun()])
    assert (start.outcome, start.seconds) == (UNFINISHED, None)
    assert [(phase.name, phase.seconds) for phase in start.phases] == [("verify", 0.002), ("engine", None)]


def test_a_start_without_phases_is_told_by_its_check_its_rungs_and_its_engine():
    ladder = [
        {"rung": "wait", "outcome": "nothing", "seconds": 1.5},
        {"rung": "ray", "outcome": "", "seconds": 6.0},
    ]
    [start] = read_starts([begun(ladder=ladder, rung="ray"), ended(phases=None)])
    assert [(phase.name, phase.at, phase.seconds) for phase in start.phases] == [
        ("verify", 0.0, 0.002), ("wait", 0.002, 1.5), ("ray", 1.502, 6.0), ("engine", 7.502, 28.0),
    ]  # fmt: skip


def test_a_hit_fetches_nothing_and_of_rays_download_the_bytes_are_unknown_unless_the_row_says_them():
    assert [
        s.bytes for s in read_starts([begun("a"), begun("b", rung="ray"), begun("c", rung="ray", bytes=7)])
    ] == [
        0,
        None,
        7,
    ]


def test_what_a_start_waited_for_is_what_stagings_of_its_deployment_fetched_meanwhile():
    def staging(at, deployment="llama"):
        artifacts = [{"name": "w", "fetched": 100}, {"name": "x", "fetched": 11}]
        facts = {"seconds": 5.0, "deployment": deployment, "artifacts": artifacts, "steps": []}
        return {"kind": "stage", "at": at, **facts}

    ladder = [{"rung": "stage", "outcome": "", "seconds": 6.0}]
    waited = begun(rung="stage", ladder=ladder)
    # Before; another's; during; one that is still syncing when the replica goes on; one that begins after that.
    rows = [staging(990.0), staging(999.0, "other"), staging(999.0), waited, staging(1004.0), staging(1005.1)]
    assert read_starts(rows)[0].bytes == 222
    assert read_starts([staging(990.0), waited])[0].bytes is None


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "start"},
        {"kind": "start", "start": "x", "ladder": "no", "seconds": "no", "at": None},
        {"kind": "start", "start": "x", "ladder": [1, {}]},
    ],
)
def test_a_row_of_another_package_version_is_no_obstacle(row):
    starts = read_starts([row, {"kind": "engine", "start": "x", "phases": [1, {"seconds": True}]}, begun()])
    assert starts[-1].id == "a1"
    draw(starts)


def test_two_starts_are_compared_phase_by_phase_in_the_order_of_a_start():
    slower = [dict(row) for row in PHASES]
    slower[5]["seconds"] = 25.0
    slower.insert(3, {"phase": "stage", "at": 10.002, "seconds": 7.0, "within": 0.0, "source": "clock"})
    first, second = read_starts([begun("a"), ended("a"), begun("b"), ended("b", phases=slower)])
    found = {d.name: (d.first, d.second, d.change) for d in compare(first, second)}
    assert list(found) == [
        "schedule",
        "imports",
        "verify",
        "stage",
        "weights",
        "warm-up",
        "compile",
        "total",
    ]
    assert found["compile"] == (5.0, 25.0, 20.0)
    assert found["warm-up"] == (3.0, 3.0, 0.0)
    assert found["stage"] == (None, 7.0, None)


def test_a_phase_of_unknown_length_is_not_compared_as_if_it_took_no_time():
    first, second = read_starts([begun("a"), begun("b"), ended("b", phases=None)])
    [engine] = [d for d in compare(first, second) if d.name == "engine"]
    assert (engine.first, engine.second, engine.change) == (None, 28.0, None)


def test_of_a_phase_in_pieces_the_whole_is_unknown_when_one_of_them_is():
    pieces = [dict(row) for row in PHASES]
    pieces[-1]["seconds"] = None
    first, second = read_starts([begun("a"), ended("a"), begun("b"), ended("b", phases=pieces)])
    [warm_up] = [d for d in compare(first, second) if d.name == "warm-up"]
    assert (warm_up.first, warm_up.second) == (3.0, None)


@pytest.mark.parametrize(
    ("seconds", "within", "told"),
    [
        (None, 0.0, "unknown"),
        (0.0011, 0.0, "1.1 ms"),
        (45.281, 0.001, "45.3 s"),
        (21.4, 0.5, "21.4 s ± 0.5"),
        (16.0, 1.0, "16.0 s ± 1"),
        (0.0, 1.0, "< 1 s"),
    ],
)
def test_seconds_are_told_as_exactly_as_they_are_known(seconds, within, told):
    assert exactly(Phase("x", 0.0, seconds, within, "clock")) == told


def test_a_real_staging_is_told_step_by_step(store, tmp_path):
    uri = make_published(tmp_path / "origin")
    stage(Spec.model_validate({"deployment": "llama", "artifacts": [{"name": "weights", "uri": uri}]}), store)
    [staging] = read_stagings(ledger.read(store))
    assert (staging.deployment, staging.outcome, staging.bytes) == ("llama", "ready", TOTAL)
    names = [phase.name for phase in staging.phases]
    assert names[0] == "resolve weights"
    assert "transfer weights" in names
    assert names[-2:] == ["live", "sync"]
    assert all(phase.seconds is not None for phase in staging.phases)
    assert max(phase.at + (phase.seconds or 0) for phase in staging.phases) <= (staging.seconds or 0) + 0.001


class Page(HTMLParser):
    """Tags that are open, and all that was there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_has_a_bar_for_each_phase_on_one_scale():
    starts = read_starts([begun("a"), ended("a"), begun("b"), ended("b", phases=PHASES[:3])])
    page = Page(draw(starts))
    assert page.open == []
    bars = [attributes for tag, attributes in page.tags if tag == "i"]
    assert len(bars) == len(PHASES) + 3
    styles = [
        dict(part.split(":") for part in (bar["style"] or "").replace("%", "").split(";")) for bar in bars
    ]
    # 40.002 seconds in all, from two before the process: the same phase is as long in both.
    assert float(styles[1]["left"]) == pytest.approx(2 / 40.002 * 100, abs=0.01)
    assert float(styles[1]["width"]) == pytest.approx(10 / 40.002 * 100, abs=0.01)
    assert styles[len(PHASES) + 1] == styles[1]
    assert {bar["class"] for bar in bars} == {"clock", "ray", "vllm"}


def test_the_page_needs_nothing_else_and_runs_nothing():
    text = draw(read_starts([begun(), ended()]))
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert "http" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_what_stands_in_the_ledger_cannot_write_into_the_page():
    bad = "<script>alert(1)</script>\"'"
    row = {"phase": bad, "at": 0, "seconds": 1, "source": bad}
    starts = read_starts(
        [
            begun(deployment=bad, rung=bad, verdict=bad, replica=bad),
            ended(outcome=bad, phases=[row]),
        ]
    )
    page = Page(draw(starts))
    assert "script" not in {tag for tag, _ in page.tags}
    assert any(bad in text for text in page.text)


def test_an_unknown_length_has_no_bar():
    page = Page(draw(read_starts([begun()])))
    assert len([tag for tag, _ in page.tags if tag == "i"]) == 1
    assert "unknown" in page.text
