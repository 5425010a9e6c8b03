"""The nodes that one replica starts on: its own and, where tensors or layers are spread further, those of its group.

An engine's workers load from the same path on every node, so each of them must have it ready, with the same bundle.
All are checked at once, each under its own lock and with its own lease. Unless all are ready, none holds anything
while rungs are tried: a staging on a node must not wait for a start that waits for it.

Where the group lies on the replica's own node alone, that is one question to Ray, and no actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from llm_prefetch.errors import FallbackError, PrefetchError
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.record import Verdict
from llm_prefetch.serve.group_node import Download, OtherNode, OwnNode, named
from llm_prefetch.serve.ladder import Note, described
from llm_prefetch.serve.start import Start, outcome_of

if TYPE_CHECKING:
    from llm_prefetch.serve.ladder import Attempt
    from llm_prefetch.serve.options import CallbackOptions

_log = logging.getLogger("ray.serve.llm_prefetch")
_AGAIN_SECONDS = 30.0
_LOG_SECONDS = 5.0
_POLL_SECONDS = 0.5
_BUNDLE_CHARACTERS = 14
_groups: dict[str, Group] = {}
"""Those whose actors are to live, by the id of the start: not on the callback, which Ray pickles into tasks."""


class Placement(Protocol):
    """Where a placement group is, and how to get onto its nodes. `RayPlacement` is the one that is used."""

    @property
    def own(self) -> str:
        """The id of the replica's own node."""

    def nodes(self) -> Mapping[str, str]:
        """The name of each node of the group, and of the own one, by its id; may block for a moment."""

    def join(self, node: str, options: CallbackOptions, replica: str, start: str) -> Any:  # noqa: ANN401
        """The handle of a new `NodeActor` there."""


class Group:
    """One start of a replica, on all nodes that it starts on."""

    def __init__(self, start: Start, placement: Placement | None = None) -> None:
        """Nothing is looked at yet.

        Args:
            start: The replica's start on its own node.
            placement: Where its other nodes are; none, if it has no placement group.
        """
        self.start = start
        self.own = OwnNode(start)
        self.others: dict[str, OtherNode] = {}
        self._placement = placement
        self._seconds = min(start.options.deadlines.check, start.options.budget_seconds)
        self._names: dict[str, str] = {}
        self._first: dict[str, DeploymentCheck] = {}
        self._last: dict[str, DeploymentCheck] = {}
        self._rungs: dict[str, str] = {}
        self._trying = "hit"
        self._holds = False

    @property
    def where(self) -> str:
        """For people: the nodes that a verdict is about."""
        if not self.others:
            return "on this node"
        return f"on the {len(self.others) + 1} nodes of its placement group"

    async def check(self) -> DeploymentCheck:
        """Check all nodes at once; a hit only if all are ready with the same bundle, and only then all hold it."""
        if self._placement is None:
            return self.start.check()
        asked = asyncio.get_running_loop().run_in_executor(None, self._placement.nodes)
        own = self.start.check()
        began, self._holds = time.monotonic(), False
        try:
            self._meet(await self._placed(asked))
        except Exception as error:  # noqa: BLE001 (whatever Ray says: unknown nodes are nodes that are not ready)
            self.start.let_go()
            reason = f"the nodes of the placement group are not known: {named(error)}"
            return own if not own.ready else _refused(own, Verdict.MISSING, reason)
        if not self.others:
            return own
        answer = self._enter({self._placement.own: own, **await self._ask()}, own)
        self._holds = answer.ready
        if not answer.ready:
            self.start.let_go()
            await asyncio.gather(*(node.let_go() for node in self.others.values()))
        seconds = time.monotonic() - began
        self.start.steps.append(("nodes", time.time() - seconds, seconds))
        return answer

    async def run(self, rung: str, note: Note) -> str:
        """Climb `wait` or `stage` on the nodes that need it, all at once; what happened.

        Raises:
            FallbackError: it did not help on one of them.
        """
        self._trying = rung
        if not self.others:
            return await self.own.run(rung, "", note)
        lacking = {key: "" for key, check in self._last.items() if not check.ready}
        # Where all are ready, but with different bundles, each may be the one to change.
        wave = lacking or {key: check.bundle for key, check in self._last.items()}
        said: dict[str, str | PrefetchError] = {}
        while wave:
            work = {key: partial(self._node(key).run, rung, refused) for key, refused in wave.items()}
            said |= await self._each(work, note)
            wave = await self._apart(said) if rung == "stage" else {}
        text = "; ".join(f"{self._names[key]}: {answer}" for key, answer in said.items())
        if any(map(_failed, said.values())):
            raise FallbackError(text, hint="see the logs of those nodes")
        return text

    @contextlib.asynccontextmanager
    async def watching(self, rung: str) -> AsyncIterator[Callable[[], bool]]:
        """For a rung that works on all nodes by itself: whether all of them are ready by now."""
        self._trying = rung
        if not self.others:
            yield self.start.peek
            return
        seen: dict[str, str] = {}

        async def look() -> None:
            while True:
                seen.update(await self._look())
                await asyncio.sleep(_POLL_SECONDS)

        task = asyncio.ensure_future(look())
        try:
            yield lambda: bool(seen) and len(set(seen.values())) == 1 and all(seen.values())
        finally:
            task.cancel()

    async def accept(self, download: Download, note: Note) -> str:
        """Pass if the workers on the other nodes may start on what Ray has downloaded there; how that is known.

        Raises:
            FallbackError: one of them may not.
        """
        self._trying = "ray"
        work = {key: partial(node.accept, download) for key, node in self.others.items()}
        seconds = self.start.options.deadlines.ray
        try:
            async with asyncio.timeout(seconds):
                said = await self._each(work, note)
        except TimeoutError:
            raise FallbackError(
                f"what Ray downloaded was not read in {seconds:g} s",
                where=described(note),
                hint="stage it, or give `ray` a later deadline",
            ) from None
        refused = [f"{self._names[key]}: {answer}" for key, answer in said.items() if _failed(answer)]
        if refused:
            raise FallbackError("; ".join(refused), hint="stage it on every node")
        return f"; so it is on {len(said)} other node{'s' if len(said) > 1 else ''}"

    def record(self, first: DeploymentCheck, bundle: str, rung: str, attempts: Sequence[Attempt]) -> None:
        """The rows in the ledgers: the replica's node tells of all nodes, each other one of itself."""
        self.start.record(
            first, bundle, rung, attempts, **({"nodes": self._told(rung)} if self.others else {})
        )
        for key, check in self._first.items():
            if key in self.others:
                self.others[key].tell("record", check, self._bundle(key), self._rungs.get(key, rung))

    def end(self, task: asyncio.Task[Any]) -> None:
        """The engine is ready or its start has failed; the event loop calls this, so nothing may be raised."""
        self.start.end(task)
        try:
            outcome = outcome_of(task)
        except Exception as error:  # noqa: BLE001 (an error that cannot say what it is)
            outcome = f"failed: {type(error).__name__}"
        for node in self.others.values():
            node.tell("end", outcome)
        if outcome != "ready" or not self._holds:
            _groups.pop(self.start.id, None)
            for node in self.others.values():
                node.leave()

    async def _placed(self, asked: Awaitable[Mapping[str, str]]) -> Mapping[str, str]:
        """Where the nodes are; a group that is not placed yet may be so in a moment."""
        assert self._placement is not None  # noqa: S101 (who calls this has looked)
        told = time.monotonic()
        ends = told + (min(self._seconds, _AGAIN_SECONDS) if self._names else self._seconds)
        last: PrefetchError | None = None
        while True:
            try:
                async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                    return await asked
            except TimeoutError:
                if last is None:
                    raise
                raise last from None  # it says more
            except PrefetchError as error:
                last = error
                if time.monotonic() + _POLL_SECONDS > ends:
                    raise
                if time.monotonic() - told > _LOG_SECONDS:
                    told = time.monotonic()
                    _log.info("llm-prefetch: %s: waits for its nodes: %s", self.start.name, error)
            await asyncio.sleep(_POLL_SECONDS)
            asked = asyncio.get_running_loop().run_in_executor(None, self._placement.nodes)

    def _meet(self, names: Mapping[str, str]) -> None:
        """Ray may have put the group elsewhere since the last time, when a node was lost."""
        assert self._placement is not None  # noqa: S101 (as above)
        own, start = self._placement.own, self.start
        self._names = {**names, own: names.get(own) or "this node"}
        for key in [key for key in self.others if key not in names]:
            self.others.pop(key).leave()
            self._last.pop(key, None)
        # The engine gets one path for all nodes. What they do not need to know stays here: it may be a secret.
        update = {"deployment": start.name, "root": start.root, "prefect": type(start.options.prefect)()}
        options = start.options.model_copy(update=update)
        for key, name in names.items():
            if key != own and key not in self.others:
                join = partial(self._placement.join, key, options, start.replica, start.id)
                self.others[key] = OtherNode(name, join)
        if self.others:
            _groups[start.id] = self

    async def _ask(self) -> dict[str, DeploymentCheck]:
        """The answers of the other nodes, with a line in the log while one is missing."""
        name, again = self.start.name, min(self._seconds, _AGAIN_SECONDS)
        tasks = {
            asyncio.ensure_future(node.check(name, again if node.joined else self._seconds)): key
            for key, node in self.others.items()
        }
        try:
            pending = set(tasks)
            while pending:
                _, pending = await asyncio.wait(pending, timeout=_LOG_SECONDS)
                if pending:
                    late = ", ".join(self._names[tasks[task]] for task in pending)
                    _log.info("llm-prefetch: %s: waits for the check on %s", name, late)
        finally:
            for task in tasks:
                task.cancel()
        return {key: task.result() for task, key in tasks.items()}

    def _enter(self, checks: dict[str, DeploymentCheck], own: DeploymentCheck) -> DeploymentCheck:
        """Keep each node's answer; the one for all of them."""
        for key, check in checks.items():
            before = self._last.get(key)
            if not check.ready:
                self._rungs.pop(key, None)
            elif before is None or not before.ready or before.bundle != check.bundle:
                self._rungs[key] = self._trying
            self._first.setdefault(key, check)
            _log.log(
                logging.INFO if check.ready else logging.WARNING, "llm-prefetch: %s is %s on %s: %s",
                check.deployment, check.verdict, self._names[key], check.reason or check.bundle,
            )  # fmt: skip
        self._last = checks
        bad = {key: check for key, check in checks.items() if not check.ready}
        if bad:
            reason = "; ".join(f"{self._names[key]}: {check.reason}" for key, check in bad.items())
            return _refused(own, next(iter(bad.values())).verdict, reason)
        if len({check.bundle for check in checks.values()}) > 1:
            has = ", ".join(
                f"{self._names[key]} has {check.bundle[:_BUNDLE_CHARACTERS]}" for key, check in checks.items()
            )
            return _refused(own, Verdict.STALE, f"its nodes have different bundles: {has}")
        return own

    def _node(self, key: str) -> OwnNode | OtherNode:
        return self.others.get(key, self.own)

    async def _each(
        self, work: Mapping[str, Callable[[Note], Awaitable[str]]], note: Note
    ) -> dict[str, str | PrefetchError]:
        """Work on nodes at once; what each says, or why it failed."""
        notes = {key: Note() for key in work}
        note.describe = lambda: "; ".join(
            f"{self._names[key]}: {described(one)}" for key, one in notes.items()
        )

        async def one(key: str) -> str | PrefetchError:
            try:
                return await work[key](notes[key])
            except PrefetchError as error:
                return error
            except Exception as error:  # noqa: BLE001 (it must not hide what became of the others)
                return FallbackError(named(error), hint="see the log of the replica")
            finally:
                notes[key].describe = lambda: "done"

        return dict(zip(work, await asyncio.gather(*map(one, work)), strict=True))

    async def _apart(self, done: Mapping[str, object]) -> dict[str, str]:
        """The nodes that were ready before, if those that are now have got another bundle than theirs."""
        found = await self._look()
        if not all(found.values()) or len(set(found.values())) == 1:
            return {}
        return {key: bundle for key, bundle in found.items() if key not in done}

    async def _look(self) -> dict[str, str]:
        """The bundle that each node has ready, or none."""
        assert self._placement is not None  # noqa: S101 (as above)
        own = self.start.look()
        looks = await asyncio.gather(*(node.look() for node in self.others.values()))
        found = {self._placement.own: own.bundle if own.ready else ""}
        return found | {key: bundle for key, (bundle, _) in zip(self.others, looks, strict=True)}

    def _bundle(self, key: str) -> str:
        check = self._last.get(key)
        return check.bundle if check is not None and check.ready else ""

    def _told(self, rung: str) -> list[dict[str, Any]]:
        """What the first check said of each node, and the bundle and the rung that it starts with."""
        return [
            {
                "node": key,
                "address": self._names.get(key, ""),
                "verdict": check.verdict,
                "reason": check.reason,
                "artifacts": {one.name: one.verdict for one in check.checks},
                "bundle": self._bundle(key),
                "rung": self._rungs.get(key, rung),
            }
            for key, check in self._first.items()
        ]


def running(start: str) -> Group | None:
    """The group of a start in this process whose engine is not up yet, or that holds leases on other nodes."""
    return _groups.get(start)


def _refused(own: DeploymentCheck, verdict: Verdict, reason: str) -> DeploymentCheck:
    return DeploymentCheck(own.deployment, own.bundle, verdict, reason, own.checks, own.members)


def _failed(answer: object) -> bool:
    return isinstance(answer, PrefetchError)
