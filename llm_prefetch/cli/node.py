"""`verify`, `ls` and `rollback`: what lies on this node, whether it is right, and back to what it was."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llm_prefetch.caches.proof import proof
from llm_prefetch.cli.bars import progress_bar
from llm_prefetch.cli.display import print_json, print_table, say, short
from llm_prefetch.errors import SpecError, UsageError, disk_error
from llm_prefetch.live import check_deployment, current_bundle, deployments, history, read_bundle, rollback
from llm_prefetch.paths import is_safe_name
from llm_prefetch.progress import Progress, size
from llm_prefetch.record import Verdict, check_record, read_record, records
from llm_prefetch.spec import Spec, load_spec
from llm_prefetch.stage import caches_left_out, repair
from llm_prefetch.store import NodeStore, open_store
from llm_prefetch.verify import Check, full_check, quick_check


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `verify`, `ls` and `rollback`."""
    verifier = commands.add_parser(
        "verify",
        parents=parents,
        help="check what is staged; exit 1 unless all is HIT",
        description="Check a deployment, an artifact, a SPEC, or everything. Quick: one stat for each file.\n"
        "Exit code 1 unless every verdict is HIT.",
    )
    verifier.add_argument(
        "what", metavar="NAME|SPEC", nargs="?", help="deployment, artifact or SPEC; all without it"
    )
    verifier.add_argument("--full", action="store_true", help="read and hash every byte")
    verifier.add_argument(
        "--repair", action="store_true", help="with --full: fetch what is wrong again, by chunk"
    )
    verifier.add_argument(
        "--proven",
        action="store_true",
        help="and an engine is known to find the deployment's compile cache here",
    )
    verifier.set_defaults(run=_verify)
    lister = commands.add_parser(
        "ls",
        parents=parents,
        help="what is staged and live on this node",
        description="What is staged and live on this node. Versions and bundles are cut to what tells them apart;\n"
        "--json has them in full.",
    )
    lister.set_defaults(run=_ls)
    back = commands.add_parser(
        "rollback",
        parents=parents,
        help="switch a deployment back to the generation before",
        description="Switch a deployment back to the generation before the live one, by one rename. Waits for\n"
        "replicas that are starting.",
        epilog="example:\n  llm-prefetch rollback llama-3-8b --to bundle-7a4c37",
    )
    back.add_argument("deployment", metavar="DEPLOYMENT", type=_name, help="see `llm-prefetch ls`")
    back.add_argument(
        "--to", metavar="BUNDLE", type=_name, help="this bundle (a prefix is enough), not the one before"
    )
    back.add_argument("--dry-run", action="store_true", help="only say which bundle it would be")
    back.set_defaults(run=_rollback)


def _name(text: str) -> str:
    if not is_safe_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


def _verify(options: argparse.Namespace) -> int:
    if options.repair and not options.full:
        raise UsageError("--repair goes with --full", hint="only a full check knows what is wrong")
    store = open_store(options.root)
    unproven = _unproven(store, options.what) if options.proven else ""
    try:
        with progress_bar(quiet=options.json or not options.full) as progress:
            checks = _checks(store, options.what, full=options.full, progress=progress)
            if options.repair:
                checks = [_repaired(store, check, progress) for check in checks]
    except OSError as error:
        raise disk_error(error, str(store.root)) from error
    ready = bool(checks) and all(check.ready for check in checks) and not unproven
    if options.json:
        print_json({"ready": ready, "checks": checks} | ({"unproven": unproven} if options.proven else {}))
    else:
        rows = ((c.name, short(c.version), c.verdict, str(c.files), size(c.bytes), c.reason) for c in checks)
        print_table(("artifact", "version", "verdict", "files", "size", "reason"), rows)
    if not checks:
        say(f"nothing is staged in {store.root}")
    if unproven and not options.json:
        say(unproven)
    return 0 if ready else 1


def _unproven(store: NodeStore, what: str | None) -> str:
    """Why no engine is known to find the compile cache of what is live; empty where one is."""
    deployment = what or ""
    if what and Path(what).is_file() and not (is_safe_name(what) and current_bundle(store, what)):
        deployment = load_spec(what).deployment
    if not is_safe_name(deployment) or current_bundle(store, deployment) is None:
        raise UsageError(
            "--proven goes with a deployment that is live here",
            where=str(store.root),
            hint="see `llm-prefetch ls`",
        )
    found = proof(store, deployment)
    if found is None:
        return f"{deployment}: no engine was tried with what is live here: see `llm-prefetch prove`"
    if not found.used:
        return f"{deployment}: {'; '.join([f'{found.outcome} on {found.node}', found.reason, *found.differences])}"
    return ""


def _repaired(store: NodeStore, check: Check, progress: Progress) -> Check:
    """The check after a repair, where one was needed and there is a version to repair."""
    record = None if check.ready or not check.version else read_record(store, check.name, check.version)
    if record is None:
        return check
    report = repair(store, record, progress=progress)
    progress.say(
        f"{check.name}: repaired, {size(report.fetched_bytes)} fetched, {size(report.reused_bytes)} kept"
    )
    return quick_check(store, check.name, check.version)


def _checks(store: NodeStore, what: str | None, *, full: bool, progress: Progress) -> list[Check]:
    """Check what was named. A deployment goes before an artifact, and both before a file, of the same name."""
    if what is None:
        found = [(record.name, record.version) for record in records(store)]
        live = [
            check for name in deployments(store) for check in _live(store, name, full=full, progress=progress)
        ]
        checked = {(check.name, check.version) for check in live}
        return live + _each(store, sorted(set(found) - checked), full=full, progress=progress)
    named = is_safe_name(what)
    if named and current_bundle(store, what) is not None:
        return _live(store, what, full=full, progress=progress)
    found = [(record.name, record.version) for record in records(store, what)] if named else []
    if found:
        return _each(store, sorted(found), full=full, progress=progress)
    if what == "-" or Path(what).is_file():
        return _spec(store, load_spec(what), full=full, progress=progress)
    raise SpecError(
        f"no deployment, artifact or spec {what!r}", where=str(store.root), hint="see `llm-prefetch ls`"
    )


def _each(
    store: NodeStore, found: Iterable[tuple[str, str]], *, full: bool, progress: Progress
) -> list[Check]:
    if full:
        return [full_check(store, name, version, progress) for name, version in found]
    return [quick_check(store, name, version) for name, version in found]


def _live(store: NodeStore, deployment: str, *, full: bool, progress: Progress) -> list[Check]:
    found = check_deployment(store, deployment, full=full, progress=progress)
    return list(found.checks) or [Check(deployment, "", found.verdict, found.reason, 0, 0)]


def _spec(store: NodeStore, spec: Spec, *, full: bool, progress: Progress) -> list[Check]:
    """Check the live deployment against the names and pins of `spec`.

    A compile cache that was left out is not missed: the node is ready without it, unless it is `required`.
    """
    checks = {check.name: check for check in _live(store, spec.deployment, full=full, progress=progress)}
    left_out = caches_left_out(store, spec.deployment)
    for artifact in spec.artifacts:
        check = checks.get(artifact.name)
        if check is None and artifact.name in left_out and not artifact.required:
            say(f"{artifact.name} was left out on this node: replicas compile for themselves")
        elif check is None:
            checks[artifact.name] = Check(
                artifact.name, "", Verdict.MISSING, f"not live in {spec.deployment}", 0, 0
            )
        elif artifact.version not in (None, check.version):
            reason = f"the spec pins {artifact.version}"
            checks[artifact.name] = Check(
                check.name, check.version, Verdict.STALE, reason, check.files, check.bytes
            )
    checks.pop(spec.deployment, None) if len(checks) > 1 else None
    return list(checks.values())


def _ls(options: argparse.Namespace) -> int:
    store = open_store(options.root)
    live = {name: current_bundle(store, name) for name in deployments(store)}
    used: dict[tuple[str, str], list[str]] = {}
    for deployment, bundle in live.items():
        for member in getattr(read_bundle(store, bundle or ""), "members", ()):
            used.setdefault((member.name, member.version), []).append(deployment)
    staged = sorted(records(store), key=lambda record: (record.name, record.version))
    if options.json:
        print_json({
            "root": store.root,
            "deployments": [{"name": n, "bundle": b, "history": history(store, n)} for n, b in live.items()],
            "artifacts": [
                {"name": r.name, "version": r.version, "uri": r.uri, "files": len(r.files), "bytes": r.bytes,
                 "verdict": check_record(store, r.name, r.version).verdict, "live": used.get((r.name, r.version), [])}
                for r in staged
            ],
        })  # fmt: skip
        return 0
    if not staged and not live:
        say(f"nothing is staged in {store.root}")
        return 0
    rows = (
        (r.name, short(r.version), check_record(store, r.name, r.version).verdict, str(len(r.files)), size(r.bytes),
         ", ".join(used.get((r.name, r.version), [])), r.uri)
        for r in staged
    )  # fmt: skip
    print_table(("artifact", "version", "verdict", "files", "size", "live in", "from"), rows)
    print()
    print_table(
        ("deployment", "live", "before"),
        ((name, short(bundle or ""), _earlier(store, name, bundle)) for name, bundle in live.items()),
    )
    return 0


def _earlier(store: NodeStore, deployment: str, live: str | None) -> str:
    """The other generations that `rollback --to` may name, the latest first."""
    seen = dict.fromkeys(reversed(history(store, deployment)))
    there = [bundle for bundle in seen if bundle != live and read_bundle(store, bundle) is not None]
    return ", ".join(short(bundle) for bundle in there)


def _rollback(options: argparse.Namespace) -> int:
    store = open_store(options.root)
    before = current_bundle(store, options.deployment)
    bundle = rollback(store, options.deployment, to=options.to, dry_run=options.dry_run)
    if options.json:
        print_json(
            {"deployment": options.deployment, "from": before, "to": bundle.id, "members": bundle.members}
        )
    else:
        done = "would go" if options.dry_run else "went"
        print(f"{options.deployment} {done} back from {short(before or '')} to {short(bundle.id)}")
    return 0
