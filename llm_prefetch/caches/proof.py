"""The proof that engines of this node find the compile cache of the live generation: a row of the ledger.

It is of one bundle: another generation has to be proven anew. An engine was booted for it here, or on a node with the
same identity.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from llm_prefetch import ledger
from llm_prefetch.caches.evidence import Outcome
from llm_prefetch.live import current_bundle
from llm_prefetch.store import NodeStore

_ROW = "proof"


@dataclass(frozen=True, slots=True)
class Proof:
    """What an engine had of the cache that is staged here."""

    deployment: str
    bundle: str
    outcome: Outcome
    reason: str
    used: bool
    """Whether it made no kernel that the cache should have held."""
    node: str
    """Where it was booted."""
    init_seconds: float | None = None
    """What vLLM says that the engine's initialization took."""
    differences: tuple[str, ...] = ()
    """Of a miss: what differs from where the cache was captured, with the fix."""


def record_proof(store: NodeStore, found: Proof) -> None:
    """Remember it on this node."""
    ledger.append(store, _ROW, **asdict(found))


def proof(store: NodeStore, deployment: str) -> Proof | None:
    """The newest proof of the generation that is live here, or `None`."""
    live = current_bundle(store, deployment)
    names = {field.name for field in fields(Proof)}
    for row in reversed(ledger.read(store, _ROW)):
        if row.get("deployment") != deployment or row.get("bundle") != live:
            continue
        try:
            found = {name: value for name, value in row.items() if name in names}
            found |= {"outcome": Outcome(row["outcome"]), "differences": tuple(row.get("differences", ()))}
            return Proof(**found)
        except (KeyError, TypeError, ValueError):  # written by another version
            continue
    return None
