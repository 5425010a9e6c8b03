"""A transfer on its own, as `stage` runs it."""

from __future__ import annotations

from llm_prefetch.errors import OriginUnavailableError
from llm_prefetch.journal import read_journal
from llm_prefetch.plan import make_plan
from llm_prefetch.salvage import prepare_partial
from llm_prefetch.stop import Stop
from llm_prefetch.transfer import Throttle, transfer
from tests.samples import Counter

WEIGHTS = "layers/0/weights.bin"


def unavailable(what="the line broke"):
    return OriginUnavailableError(what, where="fake://origin", hint="again")


def run_transfer(store, source, progress=None, stop=None, throttle=None):
    """As `stage` does, up to the commit; returns the tree and what the journal then holds."""
    journal = prepare_partial(store, source)
    plan = make_plan(store, source)
    path = store.partial(source.key) / "tree"
    journal.open()
    try:
        transfer(
            plan,
            path,
            journal,
            progress or Counter(),
            throttle=throttle or Throttle(),
            stop=stop or Stop(),
        )
    finally:
        journal.close()
    return path, read_journal(journal.path).done
