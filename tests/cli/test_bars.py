"""Progress: a bar on a terminal, a line now and then in a pipe, and never a word on stdout."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

from llm_prefetch.cli.bars import Lines
from llm_prefetch.cli.display import short
from llm_prefetch.progress import duration, size

MB = 10**6
_ESCAPE = "\x1b["


class Clock:
    """A time that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_each_ten_seconds_with_how_far_how_fast_and_how_long_still():
    clock, lines = Clock(), list[str]()
    progress = Lines(lines.append, clock)
    progress.start("weights", 1000 * MB)
    for _ in range(30):
        clock.now += 1
        progress.advance(10 * MB)
    assert lines == [
        "weights: 1.0 GB",
        "weights: 100.0 MB of 1.0 GB (10%), 9.0 MB/s, 1 min 40 s left",
        "weights: 200.0 MB of 1.0 GB (20%), 10.0 MB/s, 1 min 20 s left",
        "weights: 300.0 MB of 1.0 GB (30%), 10.0 MB/s, 1 min 10 s left",
    ]


def test_the_rate_of_a_line_is_that_of_the_last_seconds_and_what_was_here_is_no_speed():
    clock, lines = Clock(), list[str]()
    progress = Lines(lines.append, clock)
    progress.start("weights", 1000 * MB)
    progress.advance(800 * MB)
    clock.now += 10
    progress.advance(100 * MB)
    assert lines[1:] == ["weights: 900.0 MB of 1.0 GB (90%), 10.0 MB/s, 10 s left"]


def test_a_range_that_is_fetched_again_is_taken_off_and_gives_no_negative_rate():
    clock, lines = Clock(), list[str]()
    progress = Lines(lines.append, clock)
    progress.start("weights", 100 * MB)
    progress.advance(50 * MB)
    clock.now += 10
    progress.advance(-20 * MB)
    assert lines[1:] == ["weights: 30.0 MB of 100.0 MB (30%), 0 B/s"]


def test_the_next_transfer_starts_anew():
    clock, lines = Clock(), list[str]()
    progress = Lines(lines.append, clock)
    progress.start("one", 10)
    progress.advance(10)
    clock.now += 9
    progress.start("two", 0)
    clock.now += 9
    progress.advance(0)
    progress.say("a word")
    assert lines == ["one: 10 B", "two: 0 B", "a word"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16.06e9, "16.1 GB"), (2e18, "2000.0 PB")],
)
def test_sizes_are_read_at_a_glance(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (4000, "1 h 6 min")]
)
def test_times_are_read_at_a_glance(seconds, text):
    assert duration(seconds) == text


def test_identities_are_cut_to_what_tells_them_apart():
    assert short(f"b3-{'a' * 64}") == f"b3-{'a' * 12}"
    assert short(f"bundle-{'a' * 64}") == f"bundle-{'a' * 12}"
    assert short("") == ""


def _on_a_terminal(spawn, *arguments):
    """Run with stderr on a terminal; returns the process, its stdout and what the terminal got."""
    ours, theirs = pty.openpty()
    with spawn(
        *arguments, stdout=subprocess.PIPE, stderr=theirs, env={"TERM": "xterm", "COLUMNS": "120"}
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
        out = process.stdout.read()
    os.close(ours)
    return process, out.decode(), shown.decode()


def test_a_terminal_gets_a_bar(spawn, spec):
    process, out, shown = _on_a_terminal(spawn, "stage", spec)
    assert process.returncode == 0
    assert _ESCAPE in shown
    assert "weights" in shown
    assert "━" in shown
    assert shown.count(_ESCAPE + "?25l") == shown.count(_ESCAPE + "?25h"), "the cursor is given back"
    assert _ESCAPE not in out


def test_data_for_a_program_comes_without_a_bar_even_on_a_terminal(spawn, spec):
    process, out, shown = _on_a_terminal(spawn, "stage", spec, "--json")
    assert (process.returncode, shown) == (0, "")
    assert out.startswith("{")


def test_a_pipe_gets_quiet_lines_and_no_escapes(spawn, spec):
    with spawn("stage", spec, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate()
    assert process.returncode == 0
    assert err == b"weights: 61 B\n"
    assert _ESCAPE.encode() not in out


def test_a_quick_check_needs_no_progress_and_a_full_one_shows_it(run, staged):
    assert run("verify").err == ""
    assert run("verify", "--full").err == "verify weights: 61 B\n"
