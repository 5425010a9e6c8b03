"""Generations: bundles of artifact versions, and the one link that says which of them a replica starts with.

A bundle is a folder of links to versions. `live/<deployment>` is a link to a bundle, and switching it is one
rename, so a replica never mixes generations and a rollback is the same rename. A start in progress holds a
shared lock; a switch waits for it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from llm_prefetch import ledger, settings
from llm_prefetch.errors import NotReadyError, SpecError, disk_error
from llm_prefetch.holds import lift, next_hold, read_hold, write_hold
from llm_prefetch.leases import in_use
from llm_prefetch.manifest import canonical_json
from llm_prefetch.progress import Progress
from llm_prefetch.record import Verdict
from llm_prefetch.store import NodeStore, locked, read_json, sync_folder, write_file, write_link
from llm_prefetch.verify import Check, full_check, quick_check, worst

_ROLLBACK = "rollback"
UNVOUCHED = "it is code, and no pin and no trusted signature vouches for it"


@dataclass(frozen=True, slots=True)
class Member:
    """One artifact version of a bundle."""

    name: str
    kind: str
    version: str
    pinned: bool = False
    """Whether the spec, or a key that it trusts, said that it must be this version; other code is not trusted."""
    signed_by: str = field(default="", compare=False)
    """That key. Whoever vouches, the bytes are the same: so it is no part of the bundle's identity."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The versions that a deployment launches with; `id` is the digest over them."""

    id: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class DeploymentCheck:
    """The answer for a deployment on this node."""

    deployment: str
    bundle: str
    verdict: Verdict
    reason: str
    checks: tuple[Check, ...]
    members: tuple[Member, ...]

    @property
    def ready(self) -> bool:
        """Whether a replica may start."""
        return self.verdict is Verdict.HIT


def make_bundle(store: NodeStore, members: Sequence[Member]) -> Bundle:
    """Write the bundle of these versions, unless it is there.

    Raises:
        DiskError: the disk refused.
    """
    ordered = tuple(sorted(members, key=lambda member: member.name))
    identity = _as_written([replace(member, signed_by="") for member in ordered])
    bundle = Bundle("bundle-" + blake3(identity).hexdigest(), ordered)
    folder, there = store.bundle(bundle.id), read_bundle(store, bundle.id)
    if there is not None and asdict(there) == asdict(bundle) and _links_right(folder, ordered):
        return bundle
    temporary = folder.with_name(f".{bundle.id}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for member in ordered:
            (temporary / member.name).symlink_to(_link(member))
        sync_folder(temporary)
        write_file(_sidecar(store, bundle.id), _as_written(ordered))
        try:
            temporary.rename(folder)
        except OSError:  # another staging was faster, or something is wrong with what is there
            if _links_right(folder, ordered):
                shutil.rmtree(temporary)
            else:
                folder.rename(store.root / "quarantine" / f"{bundle.id}-{time.time_ns()}")
                temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise disk_error(error, str(folder)) from error
    return bundle


def _as_written(members: Sequence[Member]) -> bytes:
    """The bundle's file; a pin and a signature are written only where there is one."""
    rows = ({name: value for name, value in asdict(member).items() if value} for member in members)
    return canonical_json({"members": list(rows)})


def _link(member: Member) -> str:
    return f"../../artifacts/{member.name}/{member.version}"


def _links_right(folder: Path, members: Sequence[Member]) -> bool:
    """Whether each link of the bundle leads to its version; someone may have bent one."""
    try:
        return all((folder / member.name).readlink() == Path(_link(member)) for member in members)
    except OSError:
        return False


def read_bundle(store: NodeStore, bundle: str) -> Bundle | None:
    """The bundle called `bundle`, or `None`."""
    body = read_json(_sidecar(store, bundle))
    try:
        return Bundle(bundle, tuple(Member(**member) for member in body["members"]))
    except (TypeError, KeyError):
        return None


def current_bundle(store: NodeStore, deployment: str) -> str | None:
    """Name of the live bundle of a deployment, or `None`."""
    try:
        return store.live(deployment).readlink().name
    except OSError:
        return None


def is_live(store: NodeStore, deployment: str, members: Sequence[Member]) -> bool:
    """Whether the live bundle of a deployment is made of these."""
    live = current_bundle(store, deployment)
    bundle = read_bundle(store, live) if live else None
    return bundle is not None and set(bundle.members) == set(members)


def switch(
    store: NodeStore, deployment: str, bundle: Bundle, *, why: str, seconds: float | None = None
) -> bool:
    """Make `bundle` the live one; waits for replicas that are starting. Returns whether anything changed.

    Raises:
        NotReadyError: a rollback left this bundle, and only a rollback goes to it again.
        LockTimeoutError: replicas were still starting after `seconds` seconds.
        DiskError: the disk refused.
    """
    before, target = current_bundle(store, deployment), f"../bundles/{bundle.id}"
    if before == bundle.id and store.live(deployment).readlink() == Path(target):
        return False
    if why != _ROLLBACK:
        _refuse_what_was_left(store, deployment, before, bundle)
    patience = settings.SWITCH_SECONDS.get() if seconds is None else seconds
    with locked(
        start_lock(store, deployment), seconds=patience, waiting_for=f"a starting replica of {deployment}"
    ):
        ledger.mark("switch")
        if why != _ROLLBACK:
            lift(store, deployment)
        try:
            write_link(store.live(deployment), target)
        except OSError as error:
            raise disk_error(error, str(store.live(deployment))) from error
    ledger.append(store, "switch", deployment=deployment, bundle=bundle.id, before=before, why=why)
    return True


def _refuse_what_was_left(store: NodeStore, deployment: str, live: str | None, bundle: Bundle) -> None:
    hold = read_hold(store, deployment, live)
    if hold is not None and bundle.id in hold.left:
        raise NotReadyError(
            f"{deployment} was {hold}; this is the bundle that it left",
            where=bundle.id[:19],
            hint=f"stage another version, or go to it by `llm-prefetch rollback {deployment} --to {bundle.id[:19]}`",
        )


def rollback(
    store: NodeStore,
    deployment: str,
    *,
    to: str | None = None,
    seconds: float | None = None,
    dry_run: bool = False,
    by: str = "",
    why: str = "",
) -> Bundle:
    """Switch back to the generation before the live one, or to the bundle named `to` (a prefix is enough).

    What it goes back from is held off: see `holds`.

    Args:
        store: Of this node.
        deployment: What to roll back.
        to: A bundle, not the one before.
        seconds: How long to wait for replicas that are starting.
        dry_run: Check everything and switch nothing.
        by: Who wants it; else the user of this process.
        why: The reason, for whoever is kept from staging what was left.

    Raises:
        SpecError: there is no such deployment or bundle.
        NotReadyError: the earlier generation is not complete on this node any more.
    """
    live = current_bundle(store, deployment)
    if live is None:
        raise SpecError(
            f"no deployment {deployment!r} on this node", where=str(store.root), hint="see `llm-prefetch ls`"
        )
    target = _named(store, to) if to else _before(store, deployment)
    bundle = read_bundle(store, target)
    if bundle is None:
        raise SpecError(
            f"no bundle {target!r} on this node", where=str(store.root), hint="see `llm-prefetch ls`"
        )
    with ExitStack() as counted_on:
        for member in bundle.members:
            counted_on.enter_context(in_use(store, member.version))
            check = quick_check(store, member.name, member.version)
            if not check.ready:
                raise NotReadyError(
                    f"cannot roll back: {member.name} {member.version[:15]} is {check.verdict}: {check.reason}",
                    where=bundle.id,
                    hint="stage that version again by its `version:` pin",
                )
        if dry_run:
            return bundle
        bundle = make_bundle(store, bundle.members)  # mends its links
        try:
            write_hold(store, deployment, next_hold(store, deployment, live, bundle.id, by=by, why=why))
        except OSError as error:
            raise disk_error(error, str(store.root)) from error
        switch(store, deployment, bundle, why=_ROLLBACK, seconds=seconds)
        return bundle


def check_deployment(
    store: NodeStore, deployment: str, *, full: bool = False, progress: Progress | None = None
) -> DeploymentCheck:
    """Whether a replica of `deployment` may start on this node; the full check reads every byte.

    Raises:
        OSError: the store cannot be read.
    """
    live = current_bundle(store, deployment)
    if live is None:
        return DeploymentCheck(deployment, "", Verdict.MISSING, "nothing is live on this node", (), ())
    bundle = read_bundle(store, live)
    if bundle is None:
        return DeploymentCheck(deployment, live, Verdict.MISSING, "its bundle is gone", (), ())
    checks = []
    for member in bundle.members:
        if os.path.realpath(store.engine_path(deployment, member.name)) != os.path.realpath(
            store.artifact(member.name, member.version)
        ):
            checks.append(
                Check(member.name, member.version, Verdict.CORRUPT, "the bundle's link leads elsewhere", 0, 0)
            )
        elif full:
            checks.append(full_check(store, member.name, member.version, progress))
        else:
            checks.append(quick_check(store, member.name, member.version))
        if checks[-1].ready and member.kind == "plugin" and not member.pinned:
            checks[-1] = replace(checks[-1], verdict=Verdict.UNTRUSTED, reason=UNVOUCHED)
    bad = next((check for check in checks if not check.ready), None)
    reason = f"{bad.name}: {bad.reason}" if bad else ""
    return DeploymentCheck(deployment, live, worst(checks), reason, tuple(checks), bundle.members)


def deployments(store: NodeStore) -> list[str]:
    """Names of the deployments that are live on this node."""
    return sorted(
        path.name for path in (store.root / "live").iterdir() if path.is_symlink() and path.name[0] != "."
    )


def start_lock(store: NodeStore, deployment: str) -> Path:
    """The lock that starting replicas share and a switch takes alone."""
    return store.lock(f"start-{deployment}")


def history(store: NodeStore, deployment: str) -> list[str]:
    """Bundles that were live, oldest first, as the ledger tells."""
    return [row["bundle"] for row in ledger.read(store, "switch") if row.get("deployment") == deployment]


def generations(store: NodeStore, deployment: str) -> list[str]:
    """The bundles that a rollback goes back through, oldest first and the live one last, as the ledger tells.

    A rollback takes the newer ones off, so that the next one goes further back.
    """
    passed: list[str] = []
    for row in ledger.read(store, "switch"):
        if row.get("deployment") != deployment:
            continue
        _pass(passed, row.get("before"))  # its own row may be lost in a kill
        if row.get("why") == _ROLLBACK and row["bundle"] in passed:
            while passed[-1] != row["bundle"]:
                passed.pop()
        else:
            _pass(passed, row["bundle"])
    _pass(passed, current_bundle(store, deployment))
    return passed


def _pass(passed: list[str], bundle: str | None) -> None:
    if bundle and passed[-1:] != [bundle]:
        passed.append(bundle)


def _before(store: NodeStore, deployment: str) -> str:
    """The generation that was live before the live one."""
    passed = generations(store, deployment)
    if len(passed) > 1:
        return passed[-2]
    raise SpecError(
        f"{deployment!r} has no earlier generation on this node",
        where=str(store.root),
        hint="name one with --to; see `llm-prefetch ls`",
    )


def _named(store: NodeStore, prefix: str) -> str:
    full = prefix if prefix.startswith("bundle-") else f"bundle-{prefix}"
    found = sorted(
        path.stem for path in (store.root / "bundles").glob("bundle-*.json") if path.stem.startswith(full)
    )
    if len(found) != 1:
        what = "no bundle" if not found else f"{len(found)} bundles"
        raise SpecError(
            f"{what} on this node begin with {prefix!r}", where=str(store.root), hint="see `llm-prefetch ls`"
        )
    return found[0]


def _sidecar(store: NodeStore, bundle: str) -> Path:
    return store.root / "bundles" / f"{bundle}.json"
