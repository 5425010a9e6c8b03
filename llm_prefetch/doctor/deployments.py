"""The deployments of `prefect.yaml` against those of the server: missing, stale, and schedules that are there twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llm_prefetch.doctor.findings import Finding
from llm_prefetch.errors import SpecError

_DEPLOY = "prefect deploy --all"
_TEMPLATE = "{{"
_DTSTART = "DTSTART:20200101T000000\n"
"""What the server puts before an rrule that names no beginning."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One deployment as `prefect.yaml` has it."""

    name: str
    entrypoint: str
    content: dict[str, Any]

    @property
    def pool(self) -> str:
        """Name of its work pool."""
        return str((self.content.get("work_pool") or {}).get("name") or "")

    @property
    def title(self) -> str:
        """`flow/deployment`; the flow by its function, as Prefect names it."""
        function = self.entrypoint.replace(":", ".").rpartition(".")[2]
        return f"{function.replace('_', '-')}/{self.name}"


def read_declared(path: Path) -> list[Declared]:
    """The deployments in a `prefect.yaml`.

    Raises:
        SpecError: there is no such file, or it is not one.
    """
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        return [
            Declared(str(one["name"]), str(one["entrypoint"]), one)
            for one in content.get("deployments") or []
        ]
    except OSError as error:
        raise SpecError(
            f"cannot be read: {error.strerror}", where=str(path), hint="name the file with --prefect-file"
        ) from error
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"is no prefect.yaml: {' '.join(str(error).split())}",
            where=str(path),
            hint="each of its deployments has a name and an entrypoint",
        ) from error


def deployment_findings(declared: Sequence[Declared], there: Sequence[dict[str, Any]]) -> list[Finding]:
    """One finding for each declared deployment; `there` are the server's, each with the name of its `flow`."""
    found: list[Finding] = []
    count = Counter(one.title for one in declared)
    for one in declared:
        about = f"deployment {one.title}"
        if count[one.title] > 1:
            if all(finding.about != about for finding in found):
                says = f"declared {count[one.title]} times; the last one wins"
                found.append(Finding.failed(about, says, "give each its own name in prefect.yaml"))
            continue
        found.append(_compare(about, one, _same(one, there)))
    return found


def _same(one: Declared, there: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The server's deployment of that name: of the same entrypoint, else of the same flow."""
    flow = one.title.partition("/")[0]
    named = [found for found in there if found["name"] == one.name]
    of_entrypoint = [found for found in named if found["entrypoint"] == one.entrypoint]
    of_flow = [found for found in named if found["flow"] == flow]
    return next(iter(of_entrypoint + of_flow), None)


def _compare(about: str, one: Declared, found: dict[str, Any] | None) -> Finding:
    if found is None:
        return Finding.failed(about, "missing on the server", _DEPLOY)
    twice = _twice(found["schedules"])
    if twice:
        name = f"{found['flow']}/{found['name']}"
        mend = f"see `prefect deployment schedule ls {name}`, delete one there, then {_DEPLOY}"
        return Finding.failed(about, f"schedule {twice} is there twice: it would run twice", mend)
    stale = _stale(one, found)
    if stale:
        return Finding.warning(about, f"stale: {', '.join(stale)} differ from prefect.yaml", _DEPLOY)
    surplus = _surplus(one, found)
    if surplus:
        mend = f"delete it with `prefect deployment schedule delete`: {_DEPLOY} does not remove schedules"
        return Finding.warning(about, f"schedule {surplus} is not in prefect.yaml", mend)
    if found["paused"]:
        return Finding.warning(about, "paused", "resume it on its page in Prefect")
    return Finding.ok(about, _schedules_in_words(found["schedules"]))


def _stale(one: Declared, found: dict[str, Any]) -> list[str]:
    """The fields that differ; what a person changes on the page (a schedule's switch) is not among them."""
    wanted, pool = one.content, one.content.get("work_pool") or {}
    pairs = {
        "entrypoint": (one.entrypoint, found["entrypoint"]),
        "description": ((wanted.get("description") or "").strip(), (found["description"] or "").strip()),
        "tags": (sorted(wanted.get("tags") or []), sorted(found["tags"])),
        "parameters": (wanted.get("parameters") or {}, found["parameters"]),
        "work pool": (one.pool, found["work_pool_name"] or ""),
        "job variables": (pool.get("job_variables") or {}, found["job_variables"]),
    }
    stale = [name for name, (here, there) in pairs.items() if here != there and not _templated(here)]
    missing = {_schedule(each) for each in wanted.get("schedules") or []} - {
        _schedule({**each["schedule"], "parameters": each.get("parameters")}) for each in found["schedules"]
    }
    return [*stale, *(["schedules"] if missing else [])]


def _templated(value: object) -> bool:
    """What Prefect fills in when it deploys cannot be compared."""
    return _TEMPLATE in json.dumps(value, default=str)


def _schedule(each: dict[str, Any]) -> tuple[str, str]:
    """When it runs and with which parameters, whether it comes from the file or from the server."""
    when = next(
        (f"{kind} {each[kind].removeprefix(_DTSTART)}" for kind in ("cron", "rrule") if each.get(kind)), ""
    )
    if each.get("interval") is not None:
        when = f"every {float(each['interval']):g} s"
    zone = each.get("timezone") or "UTC"
    return (f"{when} {zone}", json.dumps(each.get("parameters") or {}, sort_keys=True, default=str))


def _twice(schedules: Sequence[dict[str, Any]]) -> str:
    times = Counter(
        _schedule({**each["schedule"], "parameters": each.get("parameters")})
        for each in schedules
        if each["active"]
    )
    slugs = Counter(each["slug"] for each in schedules if each.get("slug"))
    again = [key[0] for key, count in times.items() if count > 1]
    again += [slug for slug, count in slugs.items() if count > 1]
    return repr(again[0]) if again else ""


def _surplus(one: Declared, found: dict[str, Any]) -> str:
    known = {each.get("slug") for each in one.content.get("schedules") or []}
    return next(
        (repr(each["slug"]) for each in found["schedules"] if each.get("slug") and each["slug"] not in known),
        "",
    )


def _schedules_in_words(schedules: Sequence[dict[str, Any]]) -> str:
    if not schedules:
        return "as in prefect.yaml"
    active = sum(bool(each["active"]) for each in schedules)
    return f"as in prefect.yaml; {active} of {len(schedules)} schedules active"
