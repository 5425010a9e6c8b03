"""The scrub of one node: read every byte of what is live, and deal with what is not what its manifest says.

No file is changed where it lies, because a replica may have it mapped: a repair makes new files, and quarantine moves a
folder, and not even that while a replica runs on it. Whatever is done, a full check remembers the damage, so no replica
starts on it.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from llm_prefetch import ledger
from llm_prefetch.commit import set_aside
from llm_prefetch.errors import PrefetchError, disk_error
from llm_prefetch.leases import leased, wait_for_stagings
from llm_prefetch.live import Bundle, Member, check_deployment, current_bundle, make_bundle, read_bundle
from llm_prefetch.record import CommitRecord, Verdict, judge_record, read_record
from llm_prefetch.resolve import resolve
from llm_prefetch.spec import Artifact
from llm_prefetch.stage import repair
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore, locked
from llm_prefetch.transfer import Throttle
from llm_prefetch.verify import Check, full_check, quick_check

OnDamage = Literal["repair", "quarantine", "report"]
_WAIT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What is live after a scrub, what was found, and what was done."""

    bundle: str
    verdict: Verdict
    reason: str
    damage: tuple[str, ...] = ()
    """What was found wrong, one line for each version."""
    did: tuple[str, ...] = ()
    """What was done about it: `repaired`, `quarantined`, `staged meanwhile` by somebody else, or why not."""
    read_bytes: int = 0
    fetched_bytes: int = 0
    seconds: float = 0.0
    error: PrefetchError | None = None
    """Why a repair failed."""


def scrub(
    store: NodeStore,
    deployment: str,
    *,
    full: bool = True,
    on_damage: OnDamage = "repair",
    throttle: Throttle | None = None,
    stop: threading.Event | None = None,
) -> ScrubReport:
    """Check every version of the live bundle, and deal with what is damaged. One at a time on a node; others wait.

    Args:
        store: Of this node.
        deployment: What to check.
        full: Read every byte; else only what the quick check sees.
        on_damage: `repair` fetches wrong chunks again; `quarantine` takes the version out of use; `report` leaves it.
        throttle: Most bytes to read per second.
        stop: When set, it ends within a piece.

    Raises:
        DiskError: the disk refused.
        OriginUnavailableError: `stop` was set.
    """
    work = _Scrub(
        store, Stop(stop), _Reading(throttle or Throttle(), Stop(stop)), full=full, on_damage=on_damage
    )
    begin = time.monotonic()
    try:
        with locked(store.lock("scrub"), seconds=_WAIT_SECONDS, waiting_for="another scrub", stop=work.stop):
            bundle = work.all_of(deployment)
            if bundle is not None and on_damage == "repair":
                make_bundle(store, bundle.members)  # mends its links
            after = check_deployment(store, deployment)
    except OSError as error:
        raise disk_error(error, str(store.root)) from error
    report = ScrubReport(
        after.bundle,
        after.verdict,
        after.reason,
        tuple(work.damage),
        tuple(work.did),
        work.reading.bytes,
        work.fetched_bytes,
        round(time.monotonic() - begin, 3),
        work.error,
    )
    ledger.append(
        store,
        "scrub",
        deployment=deployment,
        bundle=report.bundle,
        outcome=str(work.error or report.verdict),
        damage=report.damage,
        did=report.did,
        read=report.read_bytes,
        fetched=report.fetched_bytes,
        seconds=report.seconds,
    )
    return report


@dataclass
class _Reading:
    """A progress that counts the bytes that are read, and slows the reading."""

    throttle: Throttle
    stop: Stop
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, label: str, total_bytes: int) -> None:
        """Nothing to show."""

    def advance(self, delta_bytes: int) -> None:
        """Count, and wait as long as the throttle asks for."""
        with self._lock:
            self.bytes += delta_bytes
        delay = self.throttle.delay(delta_bytes)
        if delay > 0:
            self.stop.wait(delay)

    def say(self, line: str) -> None:
        """Nothing to show."""


@dataclass
class _Scrub:
    store: NodeStore
    stop: Stop
    reading: _Reading
    full: bool
    on_damage: OnDamage
    damage: list[str] = field(default_factory=list)
    did: list[str] = field(default_factory=list)
    fetched_bytes: int = 0
    error: PrefetchError | None = None

    def all_of(self, deployment: str) -> Bundle | None:
        """Look at what is live, and again as long as something else goes live meanwhile; the bundle that it was."""
        seen = set[Member]()
        while True:
            live = current_bundle(self.store, deployment)
            bundle = read_bundle(self.store, live) if live else None
            todo = [member for member in bundle.members if member not in seen] if bundle else []
            if not todo:
                return bundle
            for member in todo:
                seen.add(member)
                self._one(deployment, member)

    def _one(self, deployment: str, member: Member) -> None:
        check = self._check(member)
        if check.ready:
            return
        self.damage.append(f"{check.name} {check.version[:15]} is {check.verdict}: {check.reason}")
        try:
            record = self._after_others(deployment, member)
            if judge_record(self.store, member.name, member.version, record).verdict is Verdict.HIT:
                self.did.append("staged meanwhile")
            elif record is not None and self.on_damage == "repair":
                self._ask_origin(record)
                self.fetched_bytes += repair(self.store, record).fetched_bytes
                self.did.append("repaired")
            elif record is not None and self.on_damage == "quarantine":
                self.did.append(self._quarantine(member))
        except PrefetchError as error:
            self.stop.raise_if_set()
            self.error = self.error or error

    def _after_others(self, deployment: str, member: Member) -> CommitRecord | None:
        """The record once nobody stages the version: a staging that mends it begins by taking its record away."""
        wait_for_stagings(self.store, deployment, seconds=_WAIT_SECONDS, stop=self.stop)
        with self._alone(member):
            return read_record(self.store, member.name, member.version)

    def _alone(self, member: Member) -> AbstractContextManager[None]:
        """With no other staging or repair of the version."""
        waiting = f"a staging of {member.name} {member.version[:15]}"
        lock = self.store.lock(f"stage-{member.version}")
        return locked(lock, seconds=_WAIT_SECONDS, waiting_for=waiting, stop=self.stop)

    def _check(self, member: Member) -> Check:
        if self.full:
            return full_check(self.store, member.name, member.version, self.reading, stop=self.stop)
        return quick_check(self.store, member.name, member.version)

    def _ask_origin(self, record: CommitRecord) -> None:
        """A repair begins by taking the version out of use: while its origin is away, it must not begin."""
        artifact = Artifact(name=record.name, uri=record.uri, transport=record.transport)
        resolve(artifact, stop=self.stop)

    def _quarantine(self, member: Member) -> str:
        """Take it out of use, unless it was mended meanwhile or somebody runs on it."""
        with self._alone(member):
            if full_check(self.store, member.name, member.version, self.reading, stop=self.stop).ready:
                return "right at the second look"
            if self._is_leased(member):
                return "marked: a replica runs on it"
            set_aside(self.store, member.name, member.version)
            return "quarantined"

    def _is_leased(self, member: Member) -> bool:
        used = {lease.bundle for lease in leased(self.store)}
        return any(member in getattr(read_bundle(self.store, bundle), "members", ()) for bundle in used)
