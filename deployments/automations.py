"""Automations as code: what Prefect does by itself about our runs. Safe to repeat.

    python deployments/automations.py                                create them, or update what differs
    python deployments/automations.py --notify slack-webhook/ops     tell that block when a staging failed, too
    python deployments/automations.py --dry-run                      only say what would be done
    python deployments/automations.py --delete

An automation is known by its name. Whether it is paused is decided in the UI, and stays as it is.
"""

# ruff: noqa: T201 (it talks on the terminal)
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowFilter,
    FlowFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState, RunDeployment, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

TAG = "llm-prefetch"
NODE_JOINED = "llm-prefetch.node.joined"
STAGE_FAILED = "llm-prefetch.bundle.stage-failed"
_HEARTBEAT = "prefect.flow-run.heartbeat"
_ENDS = {f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Cancelled", "Crashed")}


def main(argv: list[str] | None = None) -> int:
    """Create, update or delete the automations; the exit code of the command."""
    asked = _arguments(argv)
    if not os.environ.get("PREFECT_API_URL"):
        print("error: PREFECT_API_URL is not set: name your server, http://HOST:4200/api", file=sys.stderr)
        return 2
    with get_client(sync_client=True) as client:
        try:
            for name, make in AUTOMATIONS.items():
                print(f"{name}: {_bring(client, name, make, asked)}")
        except _AbsentError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except httpx.HTTPError as error:
            reason = str(error).partition("\n")[0]
            print(f"error: {client.api_url}: {reason}: is that the API of your server?", file=sys.stderr)
            return 3
    return 0


_Rule = tuple[EventTrigger, list[ActionTypes]]
_Make = Callable[[SyncPrefectClient, argparse.Namespace], _Rule]


def silent_runs(_client: SyncPrefectClient, asked: argparse.Namespace) -> _Rule:
    """A run whose worker was killed stays Running for ever. What it staged stays, and the next run goes on from it."""
    trigger = EventTrigger(
        after={_HEARTBEAT},
        expect={_HEARTBEAT, *_ENDS},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=asked.silence),
    )
    return trigger, [
        ChangeFlowRunState(state=StateType.CRASHED, message=f"no sign of life for {asked.silence} s")
    ]


def failed_stagings(client: SyncPrefectClient, asked: argparse.Namespace) -> _Rule:
    """Fewer nodes are ready than the SPEC asks for."""
    if not asked.notify:
        raise _SkipError("nobody to tell; make a notification block and name it: --notify slack-webhook/NAME")
    kind, _, name = asked.notify.partition("/")
    try:
        block = client.read_block_document_by_name(name, kind, include_secrets=False)
    except ObjectNotFound as error:
        raise _AbsentError(f"no block {asked.notify} on the server: see `prefect block ls`") from error
    body = (
        "{{ event.payload.message }}\n{{ event.payload.ready }} of {{ event.payload.nodes }} nodes are ready."
    )
    notification = SendNotification(
        block_document_id=block.id, subject="llm-prefetch: {{ event.resource.name }} is not staged", body=body
    )
    return EventTrigger(expect={STAGE_FAILED}), [notification]


def joined_nodes(client: SyncPrefectClient, _asked: argparse.Namespace) -> _Rule:
    """A node that says that it joined gets every model whose SPEC selects it."""
    deployments = client.read_deployments(
        flow_filter=FlowFilter(name=FlowFilterName(any_=["reconcile"])),
        deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])),
    )
    if not deployments:
        raise _SkipError("no deployment of reconcile on the server; run first: prefect deploy --all")
    trigger = EventTrigger(expect={NODE_JOINED}, match={"prefect.resource.id": "llm-prefetch.node.*"})
    return trigger, [
        RunDeployment(deployment_id=each.id) for each in sorted(deployments, key=lambda found: found.name)
    ]


AUTOMATIONS: dict[str, _Make] = {
    "llm-prefetch: a silent run is Crashed": silent_runs,
    "llm-prefetch: tell of a failed staging": failed_stagings,
    "llm-prefetch: reconcile when a node joined": joined_nodes,
}


def _bring(client: SyncPrefectClient, name: str, make: _Make, asked: argparse.Namespace) -> str:
    """Bring one automation to what it should be; what was done, in a word."""
    there: Automation | None = next(iter(client.read_automations_by_name(name)), None)
    would = "would be " if asked.dry_run else ""
    if asked.delete:
        if there is None:
            return "not there"
        if not asked.dry_run:
            client.delete_automation(there.id)
        return f"{would}deleted"
    try:
        trigger, actions = make(client, asked)
    except _SkipError as reason:
        return f"skipped: {reason}" if there is None else f"left as it is: {reason}"
    wanted = AutomationCore(name=name, description=make.__doc__ or "", trigger=trigger, actions=actions)
    if there is None:
        if not asked.dry_run:
            client.create_automation(wanted)
        return f"{would}created"
    wanted.enabled = there.enabled
    if AutomationCore.model_validate(there.model_dump(exclude={"id"})) == wanted:
        return "unchanged"
    if not asked.dry_run:
        # The client sends only what was set, so the defaults are set here; an owner is refused.
        fields = wanted.model_dump(exclude={"owner_resource"})
        client.update_automation(there.id, AutomationCore.model_validate(fields))
    return f"{would}updated"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python deployments/automations.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--notify", metavar="TYPE/NAME", help="a notification block, such as slack-webhook/ops"
    )
    parser.add_argument(
        "--silence",
        type=int,
        default=540,
        metavar="SECONDS",
        help="a run without a heartbeat for so long is Crashed; three times PREFECT_FLOWS_HEARTBEAT_FREQUENCY "
        "of the workers, which is 180 by default (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--delete", action="store_true", help="delete the automations")
    return parser.parse_args(argv)


class _SkipError(Exception):
    """This automation cannot be made yet; the text says why."""


class _AbsentError(Exception):
    """What the command line names is not on the server."""


if __name__ == "__main__":
    sys.exit(main())
