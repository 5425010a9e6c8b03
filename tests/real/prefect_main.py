"""`python -m prefect`, with one fix that its server needs.

A server of 3.7 on SQLite blocks its own event loop when an automation is written while it reads them, which it does every
five seconds, and then answers nobody any more (PrefectHQ/prefect#23055). 3.9 does it as it is done here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from prefect.cli import app
from prefect.server.events.models import automations
from prefect.utilities.asyncutils import run_coro_as_sync

_running: set[asyncio.Task[Any]] = set()


def _without_blocking(work: Coroutine[Any, Any, Any]) -> None:
    """Run it in the loop of this thread, if there is one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        run_coro_as_sync(work)
        return
    task = loop.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)


if __name__ == "__main__":
    automations.run_coro_as_sync = _without_blocking
    app()
