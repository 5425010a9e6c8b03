"""What a deployment is called elsewhere, and its name below `live/`: an index in the node store.

A Serve YAML may name a deployment as Prefect does, by `flow/deployment` or by a UUID. A staging writes down what its
own deployment is called, so a replica understands both without a network.

    <root>/names/<what it is called>        link to ../live/<name>
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llm_prefetch.errors import SpecError, disk_error
from llm_prefetch.paths import is_safe_name
from llm_prefetch.store import NodeStore, write_link


def remember(store: NodeStore, deployment_id: str, name: str) -> None:
    """Write down that the Prefect deployment `deployment_id`, a UUID or `flow/deployment`, is `live/<name>`.

    What was written down for it before is replaced. Several of them may have one name.

    Raises:
        DiskError: the disk refused.
    """
    link, target = _link(store, deployment_id), f"../live/{name}"
    try:
        if _target(link) == target:
            return
        link.parent.mkdir(exist_ok=True)
        write_link(link, target)
    except OSError as error:
        raise disk_error(error, str(link)) from error


def resolve_name(store: NodeStore, reference: str) -> str:
    """The name below `live/` that `reference` means: a UUID, `flow/deployment` or the name itself.

    Raises:
        SpecError: a UUID that no staging on this node had, or something that names nothing.
    """
    known = _target(_link(store, reference))
    if known is not None and is_safe_name(Path(known).name):
        return Path(known).name
    if is_uuid(reference):
        raise SpecError(
            "no deployment of that id has staged on this node",
            where=reference,
            hint="name it as flow/deployment, or run it once on this node; the id of a flow or of a run will not do",
        )
    flow, slash, name = reference.rpartition("/")
    if not is_safe_name(name) or (slash and not flow) or "/" in flow:
        raise SpecError(
            "that names no deployment",
            where=repr(reference),
            hint="write flow/deployment, such as stage/llama-3-8b",
        )
    return name


def speaks_for(parameters: Mapping[str, Any], name: str) -> bool:
    """Whether a Prefect deployment with these `parameters` of its own always stages `live/<name>`.

    One that is given its spec with each run does not: what it is called says nothing about what is live.
    """
    spec = parameters.get("spec")
    return isinstance(spec, Mapping) and spec.get("deployment") == name


def is_uuid(text: str) -> bool:
    """Whether `text` is a UUID, as Prefect writes one."""
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


def _link(store: NodeStore, reference: str) -> Path:
    called = str(uuid.UUID(reference)) if is_uuid(reference) else reference
    return store.root / "names" / quote(called, safe="")


def _target(link: Path) -> str | None:
    try:
        return str(link.readlink())
    except OSError:
        return None
