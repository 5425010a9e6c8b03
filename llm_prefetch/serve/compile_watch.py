"""What a start had of its compile cache: looked at before the engine starts and when it is up, then told.

A miss says what differs from the start that the cache was captured from. All of it is in the log of the replica and in
the ledger's row `engine`, under `compile`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_prefetch.caches import KIND
from llm_prefetch.caches.evidence import GRAPHS, LINES, Before, Evidence, Outcome, judge, look
from llm_prefetch.caches.explain import explain
from llm_prefetch.caches.factors import OURS_FILE, read_factors
from llm_prefetch.caches.identity import Identity, parse_identity
from llm_prefetch.caches.places import CAPTURING
from llm_prefetch.errors import PrefetchError
from llm_prefetch.serve.start_log import Files, find_text
from llm_prefetch.store import NodeStore, read_json

if TYPE_CHECKING:
    from llm_prefetch.caches.compatible import Difference
    from llm_prefetch.live import DeploymentCheck

_log = logging.getLogger("ray.serve.llm_prefetch")


@dataclass(frozen=True, slots=True)
class _Staged:
    """A staged cache: what we know of the launch that it was captured from, vLLM's own factors, and its keys."""

    built: Identity
    factors: Mapping[str, Any]
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class CompileWatch:
    """One start, from just before its engine."""

    before: Before
    here: Identity
    staged: tuple[_Staged, ...]
    refused: str = ""
    """Why none of them was given to the engine."""

    def end(self, outcome: str) -> dict[str, Any]:
        """The engine is up or its start has failed; the facts for the ledger. Never raises."""
        try:
            lines = find_text(Files.of_this_process(), LINES, self.before.at)
            evidence = judge(self.before, lines, staged=self._keys())
            differences = self._differences(evidence)
            self._tell(evidence, differences)
            facts = {**evidence.facts(), "differences": [asdict(one) for one in differences]}
            self._report(outcome, facts)
        except Exception:  # noqa: BLE001 (a start must not fail by what is told of it)
            _log.warning("llm-prefetch: what became of the compile cache cannot be told", exc_info=True)
            return {}
        return {"compile": facts}

    def _keys(self) -> frozenset[str] | None:
        if not self.staged:
            return None
        return frozenset() if self.refused else frozenset().union(*(one.keys for one in self.staged))

    def _differences(self, evidence: Evidence) -> tuple[Difference, ...]:
        """From the staged cache that is closest."""
        if evidence.used or evidence.outcome is Outcome.NONE or not self.staged:
            return ()
        added = read_factors(self.before.root)
        here = {name: found for name, found in added.items() if name not in self.before.pieces}
        return min((explain(one.built, self.here, one.factors, here) for one in self.staged), key=len)

    def _tell(self, evidence: Evidence, differences: tuple[Difference, ...]) -> None:
        level = logging.INFO if evidence.used or evidence.outcome is Outcome.NONE else logging.WARNING
        level = (
            level if evidence.keys else logging.DEBUG
        )  # an engine that compiles nothing: nobody needs to know
        why = "".join(f"; {one}" for one in differences) or (self.refused and f"; {self.refused}")
        if not why and evidence.outcome is Outcome.MISS:
            why = "; nothing that is written down differs: a plugin, a driver or a patched source may"
        _log.log(level, "llm-prefetch: compile cache %s: %s%s", evidence.outcome, evidence.reason, why)

    def _report(self, outcome: str, facts: Mapping[str, Any]) -> None:
        path = os.environ.get(CAPTURING)
        if path:
            body = {"outcome": outcome, "began": self.before.at, "ended": time.time(), "compile": facts}
            text = json.dumps({**body, "identity": self.here.to_manifest()}, default=str)
            Path(f"{path}.tmp").write_text(text, "utf-8")
            Path(f"{path}.tmp").replace(path)


def watch_compile(
    llm_config: Any,  # noqa: ANN401 (Ray's LLMConfig)
    generation: tuple[NodeStore, DeploymentCheck] | None,
    refused: str = "",
) -> CompileWatch | None:
    """Look at the cache that the engine is about to start with; `None` if that cannot be done. Never raises.

    Args:
        llm_config: As the engine gets it.
        generation: What it starts from, where that was staged.
        refused: Why the engine was given none of the caches that are staged.
    """
    try:
        model = llm_config.get_engine_config().hf_model_id
        here = Identity.of_this_node(model, llm_config.engine_kwargs, os.environ)
        return CompileWatch(look(cache_root()), here, tuple(_staged(generation)), refused)
    except Exception:  # noqa: BLE001 (as above)
        _log.warning("llm-prefetch: the compile cache cannot be looked at", exc_info=True)
        return None


def cache_root() -> Path:
    """Where an engine that is started from here keeps what it compiles: vLLM's rule."""
    found = os.environ.get("VLLM_CACHE_ROOT")
    if not found:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")  # noqa: PTH118
        found = os.path.join(base, "vllm")  # noqa: PTH118
    return Path(os.path.expanduser(found))  # noqa: PTH111 (pathlib raises for a user without a home)


def _staged(generation: tuple[NodeStore, DeploymentCheck] | None) -> Iterator[_Staged]:
    store, check = generation or (None, None)
    for member in check.members if check is not None else ():
        if store is None or member.kind != KIND:
            continue
        manifest = read_json(store.manifest(member.name, member.version)) or {}
        try:
            identity = parse_identity(manifest.get("identity") or {}, member.name)
        except PrefetchError as error:
            _log.warning("llm-prefetch: %s: %s", member.name, error)
            identity = Identity()
        factors = read_json(store.artifact(member.name, member.version) / OURS_FILE)
        paths = [str(file[0]) for file in manifest.get("files", ())]
        keys = {
            path.removeprefix(f"{GRAPHS}/").partition("/")[0] for path in paths if path.startswith(GRAPHS)
        }
        yield _Staged(identity, factors if isinstance(factors, dict) else {}, frozenset(keys))
