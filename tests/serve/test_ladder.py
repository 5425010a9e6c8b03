"""The ladder: each rung has a deadline, the whole a budget, and the check of the node decides, not the rung."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

import pytest

from llm_prefetch.errors import FallbackError
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.record import Verdict
from llm_prefetch.serve.ladder import Ladder, Note, Rung, followed
from tests.real.processes import wait_until

MISS = DeploymentCheck("llama", "", Verdict.MISSING, "nothing is live", (), ())
HIT = DeploymentCheck("llama", "bundle-a", Verdict.HIT, "", (), ())


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="ray.serve.llm_prefetch")
    return caplog


async def nothing(note: Note) -> str:
    return "did nothing"


async def fails(note: Note) -> str:
    raise FallbackError("it is down", where="there", hint="look")


async def breaks(note: Note) -> str:
    raise ZeroDivisionError("a bug\nof two lines")


async def hangs(note: Note) -> str:
    note.describe = lambda: "17 bytes"
    await asyncio.sleep(1000)
    raise AssertionError


def climb(*works: Callable[[Note], Awaitable[str]], answers=(), budget=60.0, seconds=30.0, **options):
    """Climb rungs called a, b, ...; the check says `answers`, then MISS."""
    checks = iter(answers)
    ladder = Ladder("llama", budget, **options)
    rungs = [Rung(name, seconds, work) for name, work in zip("abc", works, strict=False)]
    check = asyncio.run(ladder.climb(rungs, lambda: next(checks, MISS), MISS))
    return check, [(attempt.rung, attempt.outcome, attempt.failed) for attempt in ladder.attempts]


def test_the_rungs_are_tried_in_order_until_the_node_is_ready():
    check, attempts = climb(nothing, nothing, fails, answers=[MISS, HIT])
    assert check is HIT
    assert attempts == [("a", "did nothing", False), ("b", "did nothing", False)]


def test_a_rung_that_says_that_all_is_well_is_not_believed():
    assert climb(nothing)[0] is MISS


def test_a_rung_that_failed_may_have_made_the_node_ready_all_the_same():
    check, [(_, _, failed)] = climb(fails, answers=[HIT])
    assert (check, failed) == (HIT, True)


def test_after_a_rung_that_failed_the_next_one_is_tried():
    _, attempts = climb(fails, breaks, nothing)
    assert attempts == [
        ("a", "failed: it is down (there): look", True),
        ("b", "failed: ZeroDivisionError: a bug of two lines", True),
        ("c", "did nothing", False),
    ]


def test_a_secret_that_a_rung_repeats_is_told_nowhere(log):
    log.set_level(logging.DEBUG, logger="ray.serve.llm_prefetch")
    secret = "hunter2"

    async def leaks(note: Note) -> str:
        raise RuntimeError(f"https://me:{secret}@host/x?sig={secret} answered 'token={secret}'")

    async def leaks_too(note: Note) -> str:
        raise FallbackError(f"https://me:{secret}@host/x answered", hint="look")

    async def says(note: Note) -> str:
        return f"read https://me:{secret}@host/x"

    _, attempts = climb(leaks, leaks_too, says)
    assert attempts[0][1].startswith("failed: RuntimeError: https://host/x answered")
    assert "in leaks" in log.text  # where it came from is there for those who look for it
    assert f"me:{secret}" not in log.text + repr(attempts)
    assert f"={secret}" not in log.text + repr(attempts)


def test_a_rung_is_given_up_at_its_deadline_and_told_to_end():
    ended = []

    async def tidies_up(note: Note) -> str:
        try:
            return await hangs(note)
        finally:
            ended.append(True)

    async def comes_after(note: Note) -> str:
        return f"the other has ended: {ended}"

    _, attempts = climb(tidies_up, comes_after, seconds=0.05)
    assert attempts == [
        ("a", "gave up after 0.05 s: 17 bytes", True),
        ("b", "the other has ended: [True]", False),
    ]


def test_a_rung_that_does_not_end_when_told_so_keeps_nobody_for_long(monkeypatch):
    monkeypatch.setattr("llm_prefetch.serve.ladder._END_SECONDS", 0.05)
    release = asyncio.Event()

    async def stubborn(note: Note) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    async def main():
        ladder = Ladder("llama", 60.0)
        attempt = await ladder.attempt(Rung("a", 0.05, stubborn))
        release.set()
        return attempt

    assert asyncio.run(main()).outcome.startswith("gave up")


def test_when_the_budget_is_used_up_the_rest_is_left_out():
    _, attempts = climb(hangs, nothing, budget=0.05)
    first, second = (outcome for _, outcome, _ in attempts)
    assert first.startswith("gave up after 0.0")
    assert second == "left out: the budget of 0.05 s is used up"


def test_while_a_rung_is_at_work_the_log_says_what_it_waits_for(log):
    climb(hangs, seconds=0.5, log_seconds=0.05)
    lines = [record.getMessage() for record in log.records]
    assert lines[0] == "llm-prefetch: llama: trying `a` for at most 0 s"
    waits = r"llm-prefetch: llama: `a` for \d+ s: 17 bytes"
    assert len([line for line in lines if re.match(waits, line)]) >= 2
    assert re.match(r"llm-prefetch: llama: `a` ended after \d+\.\d s: gave up", lines[-1])


def test_a_note_that_cannot_be_told_is_no_failure():
    async def odd(note: Note) -> str:
        note.describe = lambda: str(1 // 0)
        await asyncio.sleep(0.1)
        return "done"

    assert climb(odd, log_seconds=0.01)[1] == [("a", "done", False)]


def test_what_is_no_rung_but_takes_long_says_so_too(log):
    async def slow() -> str:
        await asyncio.to_thread(wait_until, lambda: len(log.records) >= 2, 60, "it has said so twice")
        return "done"

    async def fails_late() -> str:
        await asyncio.sleep(0.1)
        raise FallbackError("it broke", hint="look")

    note = Note(lambda: "imports parsers")
    assert asyncio.run(followed(slow(), "llama", note, log_seconds=0.05)) == "done"
    lines = [record.getMessage() for record in log.records]
    assert lines.count("llm-prefetch: llama: for 0 s: imports parsers") >= 2
    with pytest.raises(FallbackError, match="it broke"):
        asyncio.run(followed(fails_late(), "llama", note))


def test_a_start_that_is_cancelled_ends_its_rung_and_tries_no_other():
    ended = []

    async def tidies_up(note: Note) -> str:
        try:
            return await hangs(note)
        finally:
            ended.append(True)

    async def main():
        ladder = Ladder("llama", 60.0)
        rungs = [Rung("a", 60, tidies_up), Rung("b", 60, nothing)]
        task = asyncio.create_task(ladder.climb(rungs, lambda: MISS, MISS))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ladder.attempts

    assert asyncio.run(main()) == []
    assert ended == [True]
