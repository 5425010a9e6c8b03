"""The config of Ray Serve with another number of replicas for one deployment, and all else as it is.

Serve applies a config as a whole: an application that is not in it is deleted, and one whose `args`, `import_path` or
`runtime_env` differ is built again, which replaces all of its replicas. So the config is read from Serve, one number is
put into the application's own list of `deployments`, and what cannot be read back whole, or would replace replicas even
so, is refused.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from llm_prefetch.errors import ClusterError

_WHOLE = 100  # percent
_CLUSTER_WIDE = ("proxy_location", "http_options", "grpc_options", "target_capacity")
_HIDDEN = "<redacted>"


def config_with(details: dict[str, Any], application: str, deployment: str, replicas: int) -> dict[str, Any]:
    """What to PUT, made from what `GET /api/serve/applications/` answered.

    Raises:
        ClusterError: the config cannot be read back whole, or would not bring the replicas.
    """
    where = f"{application}/{deployment}"
    capacity = details.get("target_capacity")
    if capacity not in (None, _WHOLE):
        raise ClusterError(
            f"Serve runs at a target_capacity of {capacity:g} %, by which it cuts every number of replicas",
            where=where,
            hint="scale when it is back at 100, or set external_scaler_enabled: true for the application",
        )
    config = {
        name: copy.deepcopy(details[name]) for name in _CLUSTER_WIDE if details.get(name) is not None
    } | {"applications": _applications(details)}
    own = next((app for app in config["applications"] if app["name"] == application), None)
    if own is None:
        raise ClusterError(
            "the application was deployed from Python, so Serve has no config of it that could be changed",
            where=application,
            hint="give serve.run external_scaler_enabled=True, or deploy it by a config file",
        )
    _refuse_to_replace(own, details["applications"][application]["deployments"][deployment], where)
    listed = own.setdefault("deployments", [])
    entry = next((one for one in listed if one["name"] == deployment), None)
    if entry is None:
        listed.append({"name": deployment, "num_replicas": replicas})
    else:
        entry["num_replicas"] = replicas
    return config


def _refuse_to_replace(config: dict[str, Any], served: dict[str, Any], where: str) -> None:
    """Serve merges the application's `runtime_env` into that of a deployment once it is listed: then all replicas go."""
    own = config.get("runtime_env") or {}
    now = ((served.get("deployment_config") or {}).get("ray_actor_options") or {}).get("runtime_env") or {}
    merged = {**own, **now, "env_vars": {**(own.get("env_vars") or {}), **(now.get("env_vars") or {})}}
    if (own or now) and merged != now:
        raise ClusterError(
            "to list the deployment in the config would change its runtime_env, and Serve would replace all its replicas",
            where=where,
            hint="set external_scaler_enabled: true for the application, or list the deployment with its num_replicas "
            "when its replicas may be replaced",
        )


def _applications(details: dict[str, Any]) -> list[dict[str, Any]]:
    """The configs of all applications that were deployed by one; those from Python are left alone by a PUT."""
    found = []
    for name, app in details["applications"].items():
        if app.get("source") != "declarative" or app.get("status") == "DELETING":
            continue
        config = app.get("deployed_app_config")
        if not config:
            raise ClusterError(
                "Serve does not tell the config of this application, and would delete it",
                where=name,
                hint="deploy it again, or set external_scaler_enabled: true for the application to scale",
            )
        if _HIDDEN in json.dumps(config):
            raise ClusterError(
                "the dashboard hides values of the runtime_env, and they would be lost",
                where=name,
                hint="ask the dashboard itself, not by a proxy that makes requests look like a browser's",
            )
        found.append(copy.deepcopy(config))
    return found
