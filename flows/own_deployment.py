"""What the Prefect deployment of this run is called, for replicas that name it in their Serve YAML."""

from __future__ import annotations

import logging

from prefect import runtime
from prefect.client.orchestration import get_client

from llm_prefetch.names import speaks_for

_log = logging.getLogger("llm_prefetch.flows")


def called(live_name: str) -> tuple[str, ...]:
    """The UUID and `flow/deployment` of this run's deployment, if it always stages `live_name`; else nothing."""
    try:
        deployment_id = runtime.deployment.id
        if not deployment_id:
            return ()
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment(deployment_id)
            flow = client.read_flow(deployment.flow_id)
    except Exception as error:  # noqa: BLE001 (whatever Prefect's client raises; what was remembered stays)
        _log.warning("cannot ask what this deployment is called: %s", error)
        return ()
    if not speaks_for(deployment.parameters or {}, live_name):
        return ()
    return (str(deployment.id), f"{flow.name}/{deployment.name}")
