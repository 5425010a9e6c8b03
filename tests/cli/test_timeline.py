"""`llm-prefetch timeline`, as a person and as a program reads it."""

from __future__ import annotations

import pytest

from llm_prefetch import ledger
from llm_prefetch.store import open_store

PHASES = [
    {"phase": "imports", "at": 0.0, "seconds": 10.0, "within": 0.001, "source": "ray log"},
    {"phase": "verify", "at": 10.0, "seconds": 0.0012, "within": 0.0, "source": "clock"},
    {"phase": "engine process", "at": 10.001, "seconds": 30.0, "within": 0.5, "source": "vllm log"},
]


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_ROOT", str(root))
    monkeypatch.setenv("COLUMNS", "200")
    return open_store(root, create=True)


def start(store, name, deployment="llama", **more):
    facts = {"verdict": "HIT", "reason": "", "rung": "hit", "seconds": 0.0012, "ladder": [], **more}
    ledger.append(store, "start", start=name, replica="r", deployment=deployment, bundle="b", **facts)


def end(store, name, outcome="ready", phases=PHASES):
    ledger.append(store, "engine", start=name, outcome=outcome, seconds=30.0, phases=phases)


@pytest.fixture
def three(here):
    """Two starts of one deployment, the second slower and by a rung, and one of another that never ended."""
    start(here, "aaa111")
    end(here, "aaa111")
    start(here, "aab222", verdict="MISSING", rung="ray")
    end(here, "aab222", "failed: EngineError: no", [*PHASES[:2], {**PHASES[2], "seconds": 50.0}])
    start(here, "ccc333", deployment="other")
    return here


def test_a_node_on_which_nothing_has_started_says_so_and_that_is_no_error(run, root):
    done = run("timeline")
    assert (done.code, done.out) == (0, "")
    assert f"no replica has started from {root} yet" in done.err


def test_the_same_as_data_is_an_empty_list(run):
    done = run("timeline", "--json")
    assert (done.code, done.json) == (0, {"starts": []})


def test_each_start_is_a_line_the_latest_last(run, three):
    done = run("timeline")
    assert done.code == 0
    assert done.rows[0] == ["start", "when", "deployment", "verdict", "rung", "fetched", "seconds", "outcome"]
    cells = [[row[0], *row[2:]] for row in done.rows[1:]]
    assert cells == [
        ["aaa111", "llama", "HIT", "hit", "0 B", "40.0", "ready"],
        ["aab222", "llama", "MISSING", "ray", "?", "60.0", "failed: EngineError: no"],
        ["ccc333", "other", "HIT", "hit", "0 B", "?", "unfinished"],
    ]


def test_a_deployment_and_a_number_choose_among_them(run, three):
    assert [row[0] for row in run("timeline", "llama").rows[1:]] == ["aaa111", "aab222"]
    assert [row[0] for row in run("timeline", "--last", "2").rows[1:]] == ["aab222", "ccc333"]
    assert [s["id"] for s in run("timeline", "llama", "--last", "1", "--json").json["starts"]] == ["aab222"]


def test_one_start_is_shown_phase_by_phase_with_bars_on_one_scale(run, three):
    done = run("timeline", "--start", "aaa")
    assert done.code == 0
    phases = done.rows[-3:]
    assert [row[0] for row in phases] == ["imports", "verify", "engine process"]
    assert [row[2] for row in phases] == ["10.0 s", "1.2 ms", "30.0 s ± 0.5"]
    assert [row[4] for row in phases] == ["ray log", "clock", "vllm log"]
    bars = [row[3] for row in phases]
    assert {len(bar) for bar in bars} == {48}
    assert bars[0] == "█" * 12 + "·" * 36
    assert bars[2] == "·" * 12 + "█" * 36


def test_on_a_narrow_screen_the_bars_are_shorter(run, three, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert {len(row[3]) for row in run("timeline", "--start", "aaa").rows[-3:]} == {18}


def test_two_starts_are_compared_phase_by_phase(run, three):
    done = run("timeline", "--compare", "aaa", "aab")
    assert done.code == 0
    assert done.rows[-4:] == [
        ["imports", "10.0", "10.0", "+0.0"],
        ["verify", "0.001", "0.001", "+0.0"],
        ["engine process", "30.0", "50.0", "+20.0"],
        ["total", "40.0", "60.0", "+20.0"],
    ]
    data = run("timeline", "--compare", "aaa", "aab", "--json").json
    assert [start["id"] for start in data["starts"]] == ["aaa111", "aab222"]
    assert data["compare"][-1] == {
        "phase": "total",
        "first": 40.001,
        "second": 60.001,
        "change": pytest.approx(20),
    }


@pytest.mark.parametrize(
    ("given", "said"), [("zz", "no starts have an id"), ("aa", "2 starts have an id"), ("", "3 starts")]
)
def test_an_id_that_names_no_start_or_several_is_a_usage_error(run, three, given, said):
    done = run("timeline", "--start", given)
    assert done.code == 2
    assert said in done.err
    assert f"({three.ledger})" in done.err


@pytest.mark.parametrize("arguments", [("--last", "0"), ("--last", "x"), ("--start", "a", "--stagings")])
def test_other_slips_are_usage_errors_too(run, arguments):
    assert run("timeline", *arguments).code == 2


def test_starts_are_drawn_into_a_page(run, three, tmp_path):
    page = tmp_path / "starts.html"
    done = run("timeline", "--html", page)
    assert done.code == 0
    assert f"drew 3 starts into {page}" in done.err
    assert page.read_text().startswith("<!doctype html>")
    assert page.read_text().count("<h2>") == 3
    assert "aab222" in page.read_text()


def test_a_page_that_cannot_be_written_is_an_error_of_the_disk(run, three, tmp_path):
    assert run("timeline", "--html", tmp_path / "no" / "folder.html").code == 4


def test_stagings_are_shown_in_their_steps(run, staged):
    done = run("timeline", "--stagings")
    assert done.code == 0
    assert done.rows[1][1] == "llama"
    assert done.rows[1][-1] == "ready"
    assert any(row[:1] == ["transfer weights"] for row in done.rows)
    [staging] = run("timeline", "--stagings", "--json").json["stagings"]
    assert staging["outcome"] == "ready"


def test_no_stagings_are_no_error(run):
    done = run("timeline", "--stagings")
    assert (done.code, done.out) == (0, "")
    assert "nothing has been staged" in done.err
