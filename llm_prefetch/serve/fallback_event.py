"""Tells Prefect that a replica did not find its node ready: an event, on which an automation may act.

Nobody waits for it, and nothing depends on it: the node's ledger has the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from llm_prefetch.redact import redact_text
from llm_prefetch.serve.prefect_client import REQUEST_SECONDS, api_url, connect

if TYPE_CHECKING:
    from llm_prefetch.serve.options import PrefectOptions

EVENT = "llm-prefetch.replica.fallback"
_log = logging.getLogger("ray.serve.llm_prefetch")


@dataclass(frozen=True, slots=True)
class Fallback:
    """What became of the start; the payload of the event."""

    deployment: str
    """The name below `live/`."""
    verdict: str
    """What the first check said."""
    reason: str
    rung: str
    """By which the replica starts; `fail` where it does not."""
    replica: str


def post_fallback(
    fallback: Fallback, options: PrefectOptions, environment: Mapping[str, str] = os.environ
) -> threading.Thread | None:
    """Post the event, if it is known where Prefect is; the thread that does it. Never raises, and never waits."""
    if not api_url(options, environment):
        return None
    thread = threading.Thread(
        target=_post, args=[_event(fallback), options, dict(environment)], name="prefect-event", daemon=True
    )
    thread.start()
    return thread


def _event(fallback: Fallback) -> dict[str, Any]:
    facts = {**asdict(fallback), "reason": redact_text(fallback.reason)}
    return {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": EVENT,
        "resource": {
            "prefect.resource.id": f"llm-prefetch.deployment.{fallback.deployment}",
            "prefect.resource.name": fallback.deployment,
        },
        "payload": {**facts, "node": socket.gethostname()},
    }


def _post(event: dict[str, Any], options: PrefectOptions, environment: Mapping[str, str]) -> None:
    async def post() -> None:
        async with asyncio.timeout(REQUEST_SECONDS), await connect(options, environment) as client:
            answer = await client.post("events", json=[event])
            answer.raise_for_status()

    try:
        asyncio.run(post())
    except Exception as error:  # noqa: BLE001 (whatever a server does, it is none of the replica's business)
        _log.debug(
            "llm-prefetch: %s was not told to Prefect: %s: %s",
            EVENT,
            type(error).__name__,
            redact_text(str(error)),
        )
