"""A staging in a process of its own, for the rung `stage`, and to commit what the rung `ray` has brought.

`python -m llm_prefetch.serve.staging_process`: the first line of standard input says what to stage. When that input
ends, the replica that asked has ended, and so does this process: what is on the disk is kept for the next staging. The
answer is one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_prefetch.errors import PrefetchError, SpecError
from llm_prefetch.spec import Spec, load_spec, parse_spec

_GRACE_SECONDS = 4.0
_SIGNALLED = 128
_NICE = 19  # an engine starts meanwhile


def main() -> int:
    """Stage, and say how it went."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_replica, args=[stop], daemon=True).start()
    try:
        answer = _work(request, stop)
    except PrefetchError as error:
        _answer({"error": str(error)})
        return error.exit_code
    _answer(answer)
    return 0


def _work(request: dict[str, Any], stop: threading.Event) -> dict[str, object]:
    from llm_prefetch.leases import staging
    from llm_prefetch.stage import stage
    from llm_prefetch.store import open_store

    spec = _spec(request["spec"], request["deployment"])
    store = open_store(Path(request["root"]) if request["root"] else None, create=True)
    with staging(store, spec.deployment):
        if "brought" not in request:
            report = stage(spec, store, stop=stop)
            seconds = round(report.seconds, 3)
            return {"fetched": report.fetched_bytes, "reused": report.reused_bytes, "seconds": seconds}
        from llm_prefetch.serve.adoption import Brought, adopt

        os.nice(_NICE)
        folder, replaced = request["brought"]
        taken, report = adopt(spec, store, Brought(Path(folder), replaced), stop)
        return {"fetched": report.fetched_bytes, **asdict(taken)}


def _spec(given: object, deployment: str) -> Spec:
    spec = (
        load_spec(given)
        if isinstance(given, str)
        else parse_spec(given, "callback_config.callback_kwargs.spec")
    )
    if deployment and spec.deployment != deployment:
        raise SpecError(
            f"it is the spec of {spec.deployment!r}, the replica is of {deployment!r}",
            where=str(given) if isinstance(given, str) else "callback_config.callback_kwargs.spec",
            hint="name the spec that the staging flow has, too",
        )
    return spec


def _answer(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _end_with_the_replica(stop: threading.Event) -> None:
    """In order if that goes quickly, else at once, which is as safe as any kill."""
    while os.read(0, 1024):  # not through sys.stdin, whose lock would keep the interpreter from ending
        pass
    stop.set()
    time.sleep(_GRACE_SECONDS)
    os._exit(_SIGNALLED + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
