"""One staging in a process of its own, so that its memory and processor time can be told apart. Prints JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from llm_prefetch import ledger
from llm_prefetch.spec import parse_spec
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store


def main(root: str, uri: str) -> None:
    """Stage `uri` into the store at `root`."""
    store = open_store(Path(root), create=True)
    spec = parse_spec({"deployment": "bench", "artifacts": [{"name": "weights", "uri": uri}]}, "bench")
    begin = time.perf_counter()
    report = stage(spec, store)
    seconds = time.perf_counter() - begin
    usage = resource.getrusage(resource.RUSAGE_SELF)
    steps = {row["step"]: row for row in ledger.read(store, "stage")[-1]["steps"]}
    print(
        json.dumps(
            {
                "bytes": report.fetched_bytes,
                "committed": steps["commit"]["at"] + steps["commit"]["seconds"],
                "transfer": steps["transfer"]["seconds"],
                "commit": steps["commit"]["seconds"],
                "sync": steps["sync"]["seconds"],
                "durable": seconds,
                "cpu": usage.ru_utime + usage.ru_stime,
                "peak": usage.ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
