"""The nodes beside each other: a path, a file system or a version that differs is what fails at three in the morning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from llm_prefetch.doctor.findings import Finding
from llm_prefetch.doctor.machine import MachineFacts

_SKEW_SECONDS = 2.0
_LITTLE_FREE = 0.1
_GIGA = 10**9
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.s3fs", "fuse.gcsfuse", "9p", "virtiofs")
_MEMORY = ("tmpfs", "ramfs")
_SAME = ("llm-prefetch", "ray", "vllm", "torch")
"""Packages of which two versions in one cluster break something."""


def compare_nodes(facts: Mapping[str, MachineFacts]) -> list[Finding]:
    """Findings over the `facts` of nodes by address: each node's store, then what must be equal on all."""
    found = [finding for address, one in facts.items() for finding in store_findings(address, one)]
    if facts:
        found.append(_same_root(facts))
        found += [_same_version(package, facts) for package in ("python", *_SAME)]
    return found


def store_findings(address: str, facts: MachineFacts) -> list[Finding]:
    """What is wrong with one node's store, or one line that says that nothing is."""
    about = f"store on {address}"
    if facts.trouble:
        return [Finding.failed(about, f"{facts.root}: {facts.trouble}", facts.mend)]
    if facts.split:
        return [
            Finding.failed(
                about,
                f"{facts.root}: {', '.join(facts.split)} lie on another file system",
                "keep all of the store on one file system: commits are renames",
            )
        ]
    free = f"{facts.free_bytes / _GIGA:.0f} of {facts.total_bytes / _GIGA:.0f} GB free on {facts.file_system}"
    says = f"{facts.root}, {free}{'' if facts.store else ', nothing staged yet'}"
    if facts.file_system in _NETWORK:
        mend = "put the root on a local disk: locks and hard links over the network are doubtful"
    elif facts.file_system in _MEMORY:
        mend = "put the root on a disk: what is staged in memory is gone after a restart, and counts as used memory"
    elif facts.free_bytes < _LITTLE_FREE * facts.total_bytes:
        mend = "free some space there; `llm-prefetch gc` deletes what no replica uses"
    else:
        return [Finding.ok(about, says)]
    return [Finding.warning(about, says, mend)]


def clock_finding(address: str, clock: float, asked: float, answered: float) -> Finding:
    """Whether a clock that was read between `asked` and `answered` (all seconds since the epoch) agrees with ours."""
    skew = clock - asked if clock < asked else max(0.0, clock - answered)
    about = f"clock of {address}"
    if abs(skew) <= _SKEW_SECONDS:
        return Finding.ok(about, f"agrees to {_SKEW_SECONDS:g} s")
    return Finding.warning(
        about,
        f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}",
        "run a time service (chrony) there: signed URLs and timelines go by the clock",
    )


def _same_root(facts: Mapping[str, MachineFacts]) -> Finding:
    groups = _groups(facts, lambda one: one.root)
    if len(groups) == 1:
        return Finding.ok("root on all nodes", next(iter(groups)))
    return Finding.failed(
        "root on all nodes",
        f"differs: {_differing(groups)}",
        "set LLM_PREFETCH_ROOT to one absolute path on every node: the engine path is part of vLLM's cache key",
    )


def _same_version(package: str, facts: Mapping[str, MachineFacts]) -> Finding:
    about = f"{package} on all nodes"
    groups = _groups(facts, lambda one: one.python if package == "python" else one.packages.get(package, ""))
    if set(groups) == {""}:
        if package == "llm-prefetch":
            return Finding.warning(
                about, "not installed as a package", "pip install llm-prefetch on every node"
            )
        return Finding.skipped(about, "not installed")
    if len(groups) == 1:
        return Finding.ok(about, next(iter(groups)))
    finding = Finding.failed if package in ("python", "ray", "llm-prefetch") else Finding.warning
    return finding(about, f"differs: {_differing(groups)}", "use one image for all nodes")


def _groups(facts: Mapping[str, MachineFacts], value: Callable[[MachineFacts], str]) -> dict[str, list[str]]:
    """Addresses by value, the most common first."""
    count = Counter(value(one) for one in facts.values())
    return {
        found: [address for address, one in facts.items() if value(one) == found]
        for found, _ in count.most_common()
    }


def _differing(groups: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{value or 'none'} on {_some(addresses)}" for value, addresses in groups.items())


def _some(addresses: Iterable[str], shown: int = 3) -> str:
    names = list(addresses)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
