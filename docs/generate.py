"""Write the reference pages that can be derived from the code: `python docs/generate.py`.

A test compares them with what this would write, so they are never behind the code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import BaseModel

from llm_prefetch import cli, errors, settings
from llm_prefetch.plugins.options import PluginFiles, PluginNames
from llm_prefetch.record import Verdict
from llm_prefetch.serve.options import CallbackOptions, Deadlines, PrefectOptions
from llm_prefetch.spec import Artifact, NodeSelector, Policy, Spec

FOLDER = Path(__file__).parent / "reference"
_GENERATED = "<!-- Written by docs/generate.py; change the code, then run it. -->\n"


def pages() -> dict[str, str]:
    """Every generated page by its file name."""
    return {
        "spec.md": _spec(),
        "cli.md": _cli(),
        "settings.md": _settings(),
        "errors.md": _errors(),
        "callback.md": _callback(),
    }


def _spec() -> str:
    parts = [
        "# SPEC",
        (
            "What a deployment launches with, where it comes from, on which nodes it must lie: a YAML file, or `-`, for the\n"
            "command line, and the parameter `spec` of the flow `stage`. Unknown fields are refused."
        ),
        (
            "```yaml\ndeployment: llama-3-8b\nartifacts:\n"
            '  - {name: weights, kind: model, uri: "s3://bucket/models/llama-3-8b", exclude: ["original/*"]}\n'
            "nodes: {labels: {ray.io/accelerator-type: A10G}}\npolicy: {bandwidth: 2GB/s, min_ready: all}\n```"
        ),
    ]
    for title, model in (
        ("Spec", Spec), ("artifacts[]", Artifact), ("artifacts[].plugins", PluginFiles), ("nodes", NodeSelector),
        ("policy", Policy),
    ):  # fmt: skip
        parts += [f"## {title}", (model.__doc__ or "").strip(), _fields(model)]
    parts.append(
        "In `include` and `exclude`, `*` matches across folders. A pattern changes what is staged, and so the version."
    )
    return _page(*parts)


def _callback() -> str:
    return _page(
        "# Callback",
        "`llm_prefetch.serve.PrefetchCallback`, named in an `LLMConfig`:",
        "```yaml\ncallback_config:\n  callback_class: llm_prefetch.serve.PrefetchCallback\n"
        "  callback_kwargs:\n    deployment: stage/llama-3-8b\n    on_miss: [wait, ray]\n```",
        "## callback_kwargs",
        _fields(CallbackOptions),
        "## callback_kwargs.deadlines",
        _fields(Deadlines),
        "## callback_kwargs.prefect",
        _fields(PrefectOptions),
        "## callback_kwargs.parsers",
        _fields(PluginNames),
        "## What it does",
        "Before Ray would download, it takes a shared lock on the deployment, so that no switch happens while the engine\n"
        "loads, and makes the quick check. On `HIT` it takes a lease on the generation, gives the engine\n"
        "`<root>/live/<deployment>/<model>`, drops the mirror and skips Ray's node initialisation. On any other verdict it\n"
        "says why in the replica's log and tries the rungs of `on_miss` in order, until the check of the node says `HIT` or\n"
        "the last rung decides: see [what a replica does on a node that is not ready](../how-to/replica-fallbacks.md). Then\n"
        "it registers parsers and models.",
        "The lock ends when the engine is up, when its start fails, or with the process; the lease ends with the process.\n"
        "The check with its ladder and the end of the engine's start are rows in the node's ledger.",
        "With `raise_error_on_callback: false` an error in the callback is logged and Ray downloads.",
    )


def _settings() -> str:
    rows = [f"| `{s.name}` | `{s.default}` | {s.doc} |" for s in settings.ALL]
    return _page(
        "# Settings",
        "Environment variables, read when they are needed. A value that cannot be read is ignored with a warning.",
        "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows]),
        "Origins read the variables of their own clients: for `s3://` `AWS_ENDPOINT_URL`, `AWS_REGION`,\n"
        "`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, web identities, container and instance roles;\n"
        "for `gs://` `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SERVICE_ACCOUNT`, `STORAGE_EMULATOR_HOST`, metadata servers and\n"
        "whatever else google-auth finds; for `abfss://` and `az://` `AZURE_STORAGE_ACCOUNT_NAME`, `_ACCOUNT_KEY`,\n"
        "`_SAS_TOKEN`, `_CONNECTION_STRING`, `_ENDPOINT` and whatever else azure-identity finds. `gs://anonymous@bucket/...`\n"
        "and `s3://anonymous@bucket/...` are read without credentials.",
    )


def _errors() -> str:
    tree = (errors.__doc__ or "").split("\n\n")[1]
    verdicts = [f"| `{name}` | {text} |" for name, text in _VERDICTS.items()]
    return _page(
        "# Errors, exit codes and verdicts",
        "An error is one line: what is wrong, where, what to do next. With `--json` it is on stdout too.",
        f"```text\n{tree}\n```",
        "\n".join(
            ["| exit code | meaning |", "|---|---|", *(f"| {c} | {m} |" for c, m in _EXIT_CODES.items())]
        ),
        "## Verdicts",
        "\n".join(["| verdict | meaning |", "|---|---|", *verdicts]),
    )


def _cli() -> str:
    parts = ["# Command line", "Data goes to stdout, talk to stderr."]
    os.environ["COLUMNS"] = "100"  # argparse wraps to the terminal
    (commands,) = [action for action in cli.make_parser()._actions if isinstance(action.choices, dict)]  # noqa: SLF001
    for name, command in commands.choices.items():
        parts += [f"## llm-prefetch {name}", f"```text\n{command.format_help().rstrip()}\n```"]
    return _page(*parts)


_EXIT_CODES = {
    0: "done",
    1: "the check says no: a verdict other than `HIT`",
    2: "bad usage or spec",
    3: "origin, network or cluster",
    4: "disk: space, permission, layout",
    5: "trust: digest, unsafe path",
    130: "interrupted (143: ended by SIGTERM)",
}
_VERDICTS = {
    Verdict.HIT: "complete, and what was asked for",
    Verdict.MISSING: "not on this node, or never committed",
    Verdict.PARTIAL: "committed, but files are gone or have another size",
    Verdict.CORRUPT: "committed, but the bytes are not those of the manifest, or were touched since",
    Verdict.STALE: "complete, but not the version asked for; or not proven since the machine was rebooted",
    Verdict.UNTRUSTED: "code that nothing vouches for: neither a pin in the spec nor a signature that it trusts",
    Verdict.INCOMPATIBLE: "a compile cache of another engine, device or configuration",
}


def _fields(model: type[BaseModel]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        needed = (
            "required"
            if field.is_required()
            else ""
            if field.default in (None, [], {})
            else f"`{_short(field.default)}`"
        )
        rows.append(f"| `{name}` | {needed} | {(field.description or '').replace('<', '&lt;')} |")
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *rows])


def _short(value: object) -> str:
    if isinstance(value, BaseModel):
        return "{}"
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list | tuple) else str(value)


def _page(*parts: str) -> str:
    return _GENERATED + "\n" + "\n\n".join(parts) + "\n"


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/reference/{name}", file=sys.stderr)


if __name__ == "__main__":
    main()
