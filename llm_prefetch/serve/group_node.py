"""One node that a replica starts on: its own, in the replica's process, or another one, by an actor of ours there.

The actor belongs to the replica's process: Ray ends it with that process, however that ends, and with it go the lock
and the lease on its node. It needs no CPU, and it is pinned to its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llm_prefetch.errors import FallbackError, PrefetchError
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.record import Finding, Verdict
from llm_prefetch.redact import redact_text
from llm_prefetch.serve.ladder import Note, described
from llm_prefetch.serve.start import Start

if TYPE_CHECKING:
    from llm_prefetch.serve.options import CallbackOptions

_log = logging.getLogger("ray.serve.llm_prefetch")
_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_CACHE_SECONDS = 60.0  # a cache that is not installed there is copied
_ABANDON_SECONDS = 8.0  # a staging process has five to end
_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Download:
    """What Ray was to bring to each node, and where it lies there."""

    source: str | None
    """What the engine gets: a folder, or a name of the Hub."""
    mirror: str | None
    """Where it comes from; nothing, if there was nothing to download."""
    what: str
    """Ray's word for the part of it."""
    load_format: str | None


class OwnNode:
    """The node that this process runs on."""

    def __init__(self, start: Start) -> None:
        """`start` holds what is held here."""
        self.start = start

    async def run(self, rung: str, refused: str, note: Note) -> str:
        """Climb `wait` or `stage` here; what happened.

        Args:
            rung: One of the two.
            refused: A bundle that other nodes do not have: that it is ready here is not enough.
            note: Told what is going on.

        Raises:
            FallbackError: it did not help.
        """
        start, options = self.start, self.start.options

        def ready() -> bool:
            check = start.look()
            return check.ready and check.bundle != refused

        if rung == "wait":
            from llm_prefetch.serve.waiting import wait_for_staging

            return await wait_for_staging(start.store, start.name, note, ready)
        from llm_prefetch.serve.staging import stage_here

        assert options.spec is not None  # noqa: S101 (the options say so)
        # A spec says the name itself where the arguments do not.
        return await stage_here(options.spec, "" if options.by_id else start.name, options.root, note, ready)

    async def accept(self, download: Download, note: Note) -> str:
        """Pass if an engine's worker may start here on what Ray has downloaded; how that is known.

        Raises:
            FallbackError: it may not.
            ManifestError: the manifest in what was downloaded cannot be read.
        """
        from llm_prefetch.serve.rays_download import accept, keep

        engine = SimpleNamespace(
            hf_model_id=download.source,
            mirror_config=download.mirror,
            engine_kwargs={"load_format": download.load_format},
        )
        config = SimpleNamespace(get_engine_config=lambda: engine)
        ctx = SimpleNamespace(worker_node_download_model=SimpleNamespace(name=download.what))
        return await accept(config, ctx, partial(keep, self.start.options), note)


class NodeActor:
    """The actor on another node. An error is an answer, so that it crosses Ray as it is."""

    def __init__(self, options: CallbackOptions, replica: str, start: str) -> None:
        """Nothing is looked at yet; `start` is the id of the replica's start."""
        self._node = OwnNode(Start(options, replica))
        self._node.start.id = start
        self._note = Note()
        self._work: asyncio.Future[str] | None = None
        self._check: DeploymentCheck | None = None

    async def check(self) -> DeploymentCheck:
        """The check; on a hit the lock and a lease are held from then on."""
        self._check = self._node.start.check()
        return self._check

    async def caches(self) -> dict[str, Finding]:
        """Whether workers here may use each compile cache that is staged; what is not installed is, first."""
        store, check = self._node.start.store, self._check
        if store is None or check is None:
            return {}
        from llm_prefetch.serve.caches import caches_for_workers

        return await asyncio.to_thread(caches_for_workers, store, check)

    async def look(self) -> tuple[str, str]:
        """The bundle that is ready now, if one is, and what is going on."""
        check = self._node.start.look()
        return check.bundle if check.ready else "", described(self._note)

    async def let_go(self) -> None:
        """Hold nothing until the next check."""
        self._node.start.let_go()

    async def run(self, rung: str, refused: str) -> str | PrefetchError:
        """Climb a rung."""
        self._note = Note()
        return await self._answer(self._node.run(rung, refused, self._note))

    async def accept(self, download: Download) -> str | PrefetchError:
        """Judge what Ray has downloaded."""
        self._note = Note()
        return await self._answer(self._node.accept(download, self._note))

    async def abandon(self) -> None:
        """Break off what is at work, and let it tidy up."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work})

    async def record(self, first: DeploymentCheck, bundle: str, rung: str) -> None:
        """The row in this node's ledger."""
        self._node.start.record(first, bundle, rung, (), role="worker")

    async def end(self, outcome: str) -> None:
        """The engine is ready, or its start has failed."""
        self._node.start.end_as_worker(outcome)

    async def _answer(self, work: Coroutine[Any, Any, str]) -> str | PrefetchError:
        self._work = asyncio.ensure_future(work)
        await asyncio.wait({self._work})
        if self._work.cancelled():
            return FallbackError("it was broken off", hint="give the rung a later deadline")
        error = self._work.exception()
        if error is None:
            return self._work.result()
        return (
            error
            if isinstance(error, PrefetchError)
            else FallbackError(named(error), hint="see the log of that node")
        )


class OtherNode:
    """A node that is asked through its actor; one that does not answer is not ready, and why is said."""

    def __init__(self, name: str, join: Callable[[], Any]) -> None:
        """`join` makes the actor; its methods are called as Ray's: `handle.check.remote()`."""
        self.name = name
        self._join = join
        self._handle: Any = None

    @property
    def joined(self) -> bool:
        """Whether there is an actor that has not failed."""
        return self._handle is not None

    async def check(self, deployment: str, seconds: float) -> DeploymentCheck:
        """The check there, or `MISSING` if there is no answer in so many seconds."""
        try:
            if self._handle is None:
                self._handle = self._join()
            answer: DeploymentCheck = await self._ask("check", seconds)
        except TimeoutError:
            reason = f"no answer in {seconds:.3g} s"
        except Exception as error:  # noqa: BLE001 (whatever Ray says of a node that is lost)
            self._handle = None  # the next check makes another one
            reason = f"it cannot be asked: {named(error)}"
        else:
            return answer
        return DeploymentCheck(deployment, "", Verdict.MISSING, reason, (), ())

    async def caches(self) -> Mapping[str, Finding] | Finding:
        """Whether workers there may use each compile cache that is staged there, or why that is not known."""
        try:
            answer: Mapping[str, Finding] = await self._ask("caches", _CACHE_SECONDS)
        except TimeoutError:
            return Finding(Verdict.MISSING, f"no answer in {_CACHE_SECONDS:.3g} s")
        except Exception as error:  # noqa: BLE001 (as above)
            return Finding(Verdict.MISSING, f"it cannot be asked: {named(error)}")
        return answer

    async def look(self) -> tuple[str, str]:
        """The bundle that is ready now, if one is, and what is going on."""
        try:
            bundle, doing = await self._ask("look", _ANSWER_SECONDS)
        except Exception as error:  # noqa: BLE001 (a look; the check decides)
            return "", f"no answer ({type(error).__name__})"
        return str(bundle), str(doing)

    async def let_go(self) -> None:
        """Hold nothing there until the next check."""
        with contextlib.suppress(Exception):  # an actor that is lost holds nothing
            await self._ask("let_go", _ANSWER_SECONDS)

    async def run(self, rung: str, refused: str, note: Note) -> str:
        """Climb `wait` or `stage` there, as `OwnNode.run`.

        Raises:
            FallbackError: it did not help, or the node is lost.
        """
        return await self._follow("run", rung, refused, note=note)

    async def accept(self, download: Download, note: Note) -> str:
        """Judge what Ray has downloaded there, as `OwnNode.accept`.

        Raises:
            FallbackError: it may not be used, or the node is lost.
        """
        return await self._follow("accept", download, note=note)

    def tell(self, method: str, *arguments: object) -> None:
        """Say something that needs no answer."""
        if self._handle is not None:
            try:
                getattr(self._handle, method).remote(*arguments)
            except Exception as error:  # noqa: BLE001 (the node is lost)
                _log.debug("llm-prefetch: %s could not be told: %s", self.name, named(error))

    def leave(self) -> None:
        """Let the actor end, when it has done what it was told."""
        self._handle = None

    async def _ask(self, method: str, seconds: float | None, *arguments: object) -> Any:  # noqa: ANN401
        if self._handle is None:
            raise FallbackError("there is no actor of ours", hint="see the log of that node")
        async with asyncio.timeout(seconds):
            return await getattr(self._handle, method).remote(*arguments)

    async def _follow(self, method: str, *arguments: object, note: Note) -> str:
        """Await a long answer, and ask meanwhile what is going on."""
        work = asyncio.ensure_future(self._ask(method, None, *arguments))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_POLL_SECONDS)
                if not work.done():
                    note.describe = partial(str, (await self.look())[1])
        except asyncio.CancelledError:
            work.cancel()
            with contextlib.suppress(Exception):
                await self._ask("abandon", _ABANDON_SECONDS)
            raise
        try:
            answer = work.result()
        except PrefetchError:
            raise
        except Exception as error:
            raise FallbackError(
                f"it cannot be asked: {named(error)}", hint="see the log of that node"
            ) from error
        if isinstance(answer, PrefetchError):
            raise answer
        return str(answer)


async def refused_caches(nodes: Iterable[OtherNode], names: Collection[str]) -> dict[str, Finding]:
    """Of the compile caches called so, those that the workers on one of the nodes may not use, and why."""
    asked, unknown = list(nodes), Finding(Verdict.MISSING, "it is not staged")
    refused: dict[str, Finding] = {}
    for node, answer in zip(asked, await asyncio.gather(*(node.caches() for node in asked)), strict=True):
        for name in names:
            found = answer if isinstance(answer, Finding) else answer.get(name, unknown)
            if found.verdict is not Verdict.HIT:
                refused.setdefault(name, Finding(found.verdict, f"{node.name}: {found.reason}"))
    return refused


def named(error: BaseException) -> str:
    """What an error says, on one line. Ray's tell a long story; its beginning says what it is about."""
    text = redact_text(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:_REASON_CHARACTERS]}" if text else type(error).__name__
