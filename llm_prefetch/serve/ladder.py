"""The ladder: what a replica tries, one rung after the other, when its node is not ready.

A rung has a deadline, the whole ladder a budget. After each rung the check of the node decides, whatever the rung
says of itself. While a rung is at work a line in the log says every few seconds what it waits for.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from llm_prefetch.errors import PrefetchError
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.redact import redact_text

_log = logging.getLogger("ray.serve.llm_prefetch")
_LOG_SECONDS = 5.0
_END_SECONDS = 10.0
_Value = TypeVar("_Value")


@dataclass
class Note:
    """What a rung waits for now; asked whenever a line is due."""

    describe: Callable[[], str] = field(default=lambda: "at work")


@dataclass(frozen=True, slots=True)
class Rung:
    """One thing to try. `work` says what it did, or raises."""

    name: str
    seconds: float
    work: Callable[[Note], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a rung ended."""

    rung: str
    outcome: str
    seconds: float
    failed: bool
    began: float
    """By the wall clock, in seconds since the epoch."""


class Ladder:
    """The rungs that were tried for `deployment`, within a budget that begins now."""

    def __init__(self, deployment: str, budget_seconds: float, *, log_seconds: float = _LOG_SECONDS) -> None:
        """`log_seconds` is the time between two lines of a rung."""
        self.attempts: list[Attempt] = []
        self._deployment = deployment
        self._budget = budget_seconds
        self._ends = time.monotonic() + budget_seconds
        self._log_seconds = log_seconds

    async def climb(
        self,
        rungs: Sequence[Rung],
        check: Callable[[], DeploymentCheck | Awaitable[DeploymentCheck]],
        missed: DeploymentCheck,
    ) -> DeploymentCheck:
        """Try the rungs in order until `check` says that the node is ready; the last answer of `check`."""
        for rung in rungs:
            await self.attempt(rung)
            answer = check()
            missed = answer if isinstance(answer, DeploymentCheck) else await answer
            if missed.ready:
                break
        return missed

    async def attempt(self, rung: Rung) -> Attempt:
        """Try one rung; nothing but a cancellation is raised."""
        began, left = time.monotonic(), self._ends - time.monotonic()
        if left <= 0:
            return self._enter(
                rung, f"left out: the budget of {self._budget:g} s is used up", began, failed=True
            )
        seconds = min(rung.seconds, left)
        _log.info("llm-prefetch: %s: trying `%s` for at most %.0f s", self._deployment, rung.name, seconds)
        note = Note()
        task = asyncio.ensure_future(rung.work(note))
        try:
            await self._watch(task, rung, note, began, seconds)
            if not task.done():
                return self._enter(
                    rung, f"gave up after {seconds:.3g} s: {described(note)}", began, failed=True
                )
            return self._enter(rung, task.result(), began, failed=False)
        except PrefetchError as error:
            return self._enter(rung, f"failed: {error}", began, failed=True)
        except Exception as error:  # noqa: BLE001 (whatever a rung meets, the next one is tried)
            _log.debug("llm-prefetch: `%s` failed: %s", rung.name, told(error))
            return self._enter(rung, f"failed: {type(error).__name__}: {error}", began, failed=True)
        finally:
            await _end(task)

    async def _watch(
        self, task: asyncio.Future[str], rung: Rung, note: Note, began: float, seconds: float
    ) -> None:
        """Wait for the rung until its deadline, with a line every few seconds."""
        while not task.done() and (left := began + seconds - time.monotonic()) > 0:
            await asyncio.wait({task}, timeout=min(self._log_seconds, left))
            if not task.done():
                _log.info(
                    "llm-prefetch: %s: `%s` for %.0f s: %s",
                    self._deployment, rung.name, time.monotonic() - began, described(note),
                )  # fmt: skip

    def _enter(self, rung: Rung, outcome: str, began: float, *, failed: bool) -> Attempt:
        outcome = redact_text(" ".join(outcome.split()))
        seconds = time.monotonic() - began
        attempt = Attempt(rung.name, outcome, round(seconds, 3), failed, time.time() - seconds)
        self.attempts.append(attempt)
        level = logging.WARNING if failed else logging.INFO
        _log.log(
            level, "llm-prefetch: %s: `%s` ended after %.1f s: %s",
            self._deployment, rung.name, attempt.seconds, outcome,
        )  # fmt: skip
        return attempt


async def followed(
    work: Awaitable[_Value], deployment: str, note: Note, *, log_seconds: float = _LOG_SECONDS
) -> _Value:
    """What `work` answers, which is no rung but may take as long: a line in the log every few seconds says what it does."""
    task, began = asyncio.ensure_future(work), time.monotonic()
    try:
        while not (await asyncio.wait({task}, timeout=log_seconds))[0]:
            seconds = time.monotonic() - began
            _log.info("llm-prefetch: %s: for %.0f s: %s", deployment, seconds, described(note))
        return task.result()
    finally:
        task.cancel()


async def _end(task: asyncio.Future[str]) -> None:
    """Cancel what is still at work and let it tidy up, but not for ever."""
    if task.done():
        return
    task.cancel()
    await asyncio.wait({task}, timeout=_END_SECONDS)
    if task.done() and not task.cancelled():
        task.exception()  # it was told to end; how it did so is not of interest any more


def described(note: Note) -> str:
    """What a rung waits for; never raises."""
    try:
        return note.describe()
    except Exception as error:  # noqa: BLE001 (a line in the log)
        return f"at work ({redact_text(str(error))})"


def told(error: BaseException) -> str:
    """An error that nobody foresaw, with where it came from, and without the secrets that it may repeat."""
    where = "".join(traceback.format_tb(error.__traceback__))
    return f"{redact_text(repr(error))}\n{where}"
