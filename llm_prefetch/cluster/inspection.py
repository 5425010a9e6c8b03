"""What the nodes hold of a deployment, and what its spec asks for now. The functions here run on the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llm_prefetch.caches import KIND
from llm_prefetch.errors import disk_error
from llm_prefetch.holds import Hold, read_hold
from llm_prefetch.live import Member, check_deployment
from llm_prefetch.manifest import Manifest
from llm_prefetch.record import Finding, Verdict, read_record
from llm_prefetch.spec import Spec
from llm_prefetch.stage import caches_left_out
from llm_prefetch.stage_caches import LeftOut, find_trusted
from llm_prefetch.stop import Stop
from llm_prefetch.store import open_store

_ORIGIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LiveMember:
    """An artifact version that is live on a node, and where it came from."""

    member: Member
    uri: str
    """Redacted."""
    listing: str
    """Key of the listing it was made from on this node; empty where a manifest was known."""


@dataclass(frozen=True, slots=True)
class LiveBundle:
    """What is live on a node by the quick check; `bundle` is empty when nothing is."""

    bundle: str
    verdict: Verdict
    reason: str
    members: tuple[LiveMember, ...]
    hold: Hold | None = None
    left_out: frozenset[str] = frozenset()
    """Compile caches that the newest staging left out here, because they do not fit the node."""

    @property
    def core(self) -> frozenset[tuple[str, str]]:
        """Names and versions of all but the compile caches, which differ among nodes that differ."""
        return core([one.member for one in self.members])


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a spec asks for: a member, whose version is empty as long as only its listing is known."""

    member: Member
    listing: str = ""


def live_bundle(deployment: str, root: Path | None) -> LiveBundle:
    """What is live on this node. A node without a store holds nothing.

    Raises:
        DiskError: the store cannot be read.
    """
    store = open_store(root, missing_ok=True)
    try:
        check = check_deployment(store, deployment)
        records = [read_record(store, member.name, member.version) for member in check.members]
    except OSError as error:
        raise disk_error(error, str(store.root)) from error
    members = tuple(
        LiveMember(member, record.uri if record else "", record.listing if record else "")
        for member, record in zip(check.members, records, strict=True)
    )
    hold = read_hold(store, deployment, check.bundle)
    left_out = caches_left_out(store, deployment)
    return LiveBundle(check.bundle, check.verdict, check.reason, members, hold, left_out)


def core(members: Sequence[Member]) -> frozenset[tuple[str, str]]:
    """Names and versions of all `members` but compile caches."""
    return frozenset((member.name, member.version) for member in members if member.kind != KIND)


def wanted_by(spec: Spec) -> tuple[Wanted, ...]:
    """What `spec` asks for now, without caches that nothing vouches for. Only of what it does not pin, the origin is asked.

    Raises:
        OriginError: an origin cannot be read.
    """
    found = []
    stop = Stop(seconds=_ORIGIN_SECONDS)
    for artifact in spec.artifacts:
        wanted, version, listing = artifact, artifact.version or "", ""
        if not version:
            source = find_trusted(artifact, spec, stop=stop)
            if isinstance(source, LeftOut):
                continue
            wanted, content = source.artifact, source.content
            version, listing = (content.version, "") if isinstance(content, Manifest) else ("", content.key)
        found.append(Wanted(Member(wanted.name, wanted.kind, version, wanted.pinned), listing))
    return tuple(found)


def settle(wanted: Sequence[Wanted], lives: Sequence[LiveBundle]) -> tuple[Member, ...]:
    """The wanted members. The version of a listing is known from any node that staged it."""
    made = {(one.member.name, one.listing): one.member.version for live in lives for one in live.members}
    return tuple(
        replace(one.member, version=made.get((one.member.name, one.listing), ""))
        if one.listing
        else one.member
        for one in wanted
    )


def compare(live: LiveBundle, wanted: Sequence[Member]) -> Finding:
    """Whether what is live is ready, and what is wanted."""
    if live.verdict is not Verdict.HIT:
        return Finding(live.verdict, live.reason)
    there = {one.member.name: one.member for one in live.members}
    for member in wanted:
        found = there.pop(member.name, None)
        if found is None and member.name in live.left_out:
            continue
        if found is None:
            return Finding(Verdict.STALE, f"{member.name} is not in the live bundle")
        if not member.version:
            return Finding(Verdict.STALE, f"{member.name}: no node tells which version the origin holds now")
        if found.version != member.version:
            wants = f"{found.version[:15]}, not {member.version[:15]}"
            return Finding(Verdict.STALE, f"{member.name} is {wants}")
        if found != member:
            return Finding(Verdict.STALE, f"{member.name} is of another kind, or pinned otherwise")
    if there:
        return Finding(Verdict.STALE, f"{min(there)} is live, and not in the spec")
    return Finding(Verdict.HIT)
