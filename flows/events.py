"""Events: what `llm_prefetch.cluster.notices` says, sent to Prefect."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prefect.events import emit_event

from llm_prefetch.cluster import Notice

_log = logging.getLogger("llm_prefetch.flows")


def announce(told: Iterable[Notice]) -> None:
    """Send an event for each notice; Prefect adds the run, its flow and its deployment to each.

    They are sent in the background. A server that is away does not hold up a run or fail it.
    """
    for notice in told:
        try:
            emit_event(
                event=notice.event,
                resource={"prefect.resource.id": notice.resource, "prefect.resource.name": notice.name},
                related=[
                    {"prefect.resource.id": resource, "prefect.resource.role": role}
                    for resource, role in notice.related.items()
                ],
                payload=dict(notice.payload),
            )
        except Exception as error:  # noqa: BLE001 (whatever Prefect makes of it; the files are there)
            _log.warning("cannot announce %s: %s", notice.event, error)
