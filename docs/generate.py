"""Write the reference pages that can be derived from the code: `python docs/generate.py`.

A test compares them with what this would write, so they are never behind the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import sys
import textwrap
from pathlib import Path

from pydantic import BaseModel

from llm_prefetch import cli, errors, settings
from llm_prefetch.plugins.options import PluginFiles, PluginNames
from llm_prefetch.record import Verdict
from llm_prefetch.serve.lifecycle import HOOKS, NodeInitializationCallback, NodeInitializationContext
from llm_prefetch.serve.lifecycle.options import LifecycleOptions, MemberOptions
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
        "lifecycle.md": _lifecycle(),
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


def _lifecycle() -> str:
    hooks = [
        f"| `{hook}` | {_text(getattr(NodeInitializationCallback, hook))} | {'yes' if hook in ONLY_IN_SERVER else ''} |"
        for hook in HOOKS
    ]
    fields = [
        f"| `{field.name}` | {_RAYS_FIELDS.get(field.name) or _said_of_fields(NodeInitializationContext)[field.name]} |"
        for field in dataclasses.fields(NodeInitializationContext)
    ]
    return _page(
        "# Lifecycle callbacks",
        "`llm_prefetch.serve.LifecycleCallback` runs several callbacks in one `LLMConfig`, in order and with one context:\n"
        "callbacks of Ray's kind, such as `PrefetchCallback`, and any class with some of eight hooks. How to write one is\n"
        "[a page of its own](../how-to/write-a-callback.md).",
        "```yaml\nserver_cls: llm_prefetch.serve.server.LLMServer     # for the hooks that need it\n"
        "callback_config:\n  callback_class: llm_prefetch.serve.LifecycleCallback\n"
        "  callback_kwargs:\n    callbacks:\n"
        "      - {callback_class: my_company.callbacks.Metrics, raise_error_on_callback: false}\n"
        "      - {callback_class: llm_prefetch.serve.PrefetchCallback, callback_kwargs: {deployment: stage/llama-3-8b}}\n```",
        "## callback_kwargs",
        _fields(LifecycleOptions),
        "## callback_kwargs.callbacks[]",
        _fields(MemberOptions),
        "## Hooks",
        "All are optional, and a class need not derive from `llm_prefetch.serve.lifecycle.NodeInitializationCallback`. Each may\n"
        "be a coroutine; one that returns `False` skips the default of its phase. They are called in this order, each with\n"
        "the context as its only argument:",
        "\n".join(["| hook | when | needs `server_cls` |", "|---|---|---|", *hooks]),
        "## The context",
        textwrap.fill(_text(NodeInitializationContext).partition(" Inherited")[0], 118),
        "\n".join(["| field | what it is |", "|---|---|", *fields]),
    )


ONLY_IN_SERVER = (
    "on_pre_placement_group",
    "on_post_placement_group",
    "on_post_engine_init",
    "on_post_initialization",
)
"""Hooks that Ray's own server does not lead to."""
_RAYS_FIELDS = {
    "worker_node_download_model": "Ray's: what its tasks download on each node, a `NodeModelDownloadable`.",
    "placement_group": "Ray's: where the engine's workers go. With `server_cls`, there from `on_post_placement_group` on.",
    "runtime_env": "Ray's: that of the download and the engine-config tasks.",
    "custom_data": "Ray's: a dict for the callbacks themselves.",
    "run_init_node": "Ray's: whether it downloads; `False` once a hook has skipped that.",
}


def _text(thing: object) -> str:
    """The docstring in one line."""
    return " ".join((inspect.getdoc(thing) or "").split())


def _said_of_fields(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass."""
    (body,) = (
        node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)
    )
    said = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            said[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return said


def _settings() -> str:
    rows = [f"| `{s.name}` | `{s.default}` | {s.doc} |" for s in settings.ALL]
    parts = [
        "# Settings",
        "Environment variables, read when they are needed. A value that cannot be read is ignored with a warning.",
        "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows]),
        "## Variables of others",
        "They mean what they mean to the tools that they come from.",
    ]
    for title, others in _OTHERS.items():
        rows = [
            f"| {', '.join(f'`{name}`' for name in names.split())} | {text} |"
            for names, text in others.items()
        ]
        parts += [f"### {title}", "\n".join(["| variable | what it does here |", "|---|---|", *rows])]
    return _page(*parts)


_OTHERS = {
    "Every origin that is read by HTTP": {
        "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY": (
            "The proxy on the way to an origin, in capitals or not; an `http://` one. This machine itself is never asked "
            "through a proxy."
        ),
        "SSL_CERT_FILE": "The certificates that are trusted, in place of the system's.",
        "AWS_CA_BUNDLE": "The same by boto3's name, for ranges and for all of `s3://`, where `SSL_CERT_FILE` is not set.",
    },
    "`s3://`": {
        "AWS_ENDPOINT_URL_S3 AWS_ENDPOINT_URL": (
            "Another endpoint than Amazon's, the first one before the second; buckets are then named in the path."
        ),
        "AWS_REGION AWS_DEFAULT_REGION": "The region.",
        "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN": "Keys; they come before profiles.",
        "AWS_PROFILE AWS_SHARED_CREDENTIALS_FILE": (
            "Where the first is set, or the file is there (`~/.aws/credentials`), boto3 finds the credentials."
        ),
        "AWS_WEB_IDENTITY_TOKEN_FILE AWS_ROLE_ARN": "A web identity. Roles of containers and instances are found, too.",
    },
    "`gs://`": {
        "GOOGLE_SERVICE_ACCOUNT_KEY": "The key of a service account itself, as JSON.",
        "GOOGLE_SERVICE_ACCOUNT GOOGLE_SERVICE_ACCOUNT_PATH GOOGLE_APPLICATION_CREDENTIALS": (
            "A file with it; the first that is set. Without any, what google-auth finds."
        ),
        "GOOGLE_BEARER_TOKEN": "A token, where there is no key.",
        "GOOGLE_SKIP_SIGNATURE": "1: no credentials, as with `gs://anonymous@bucket`.",
        "GOOGLE_BASE_URL": "Another endpoint.",
        "STORAGE_EMULATOR_HOST": "An emulator, without credentials.",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": (
            "`transport: fsspec` sets it to `false` unless you set it: gcsfs would wait a minute for an endpoint that is not "
            "Google's."
        ),
    },
    "`abfss://`, `az://`": {
        "AZURE_STORAGE_ACCOUNT_NAME": "The account, where the URI names none.",
        "AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_ACCESS_KEY AZURE_STORAGE_MASTER_KEY": (
            "Its key, under three names; it comes before a SAS token."
        ),
        "AZURE_STORAGE_SAS_TOKEN AZURE_STORAGE_SAS_KEY": "A SAS token, under two names.",
        "AZURE_STORAGE_CONNECTION_STRING": "What the variables above leave open, if it is of the same account.",
        "AZURE_STORAGE_TOKEN AZURE_STORAGE_CLIENT_ID": (
            "A token or an identity for obstore; without them, what azure-identity finds."
        ),
        "AZURE_STORAGE_ENDPOINT AZURE_ENDPOINT": "Another endpoint.",
        "AZURE_SKIP_SIGNATURE": "1: no credentials.",
        "AZURE_STORAGE_USE_EMULATOR AZURITE_BLOB_STORAGE_URL": (
            "The emulator, with its own account and key; at `http://127.0.0.1:10000`, or where the second says."
        ),
    },
    "`hf://`": {
        "HF_TOKEN": "The token for gated and private models; else the one that `hf auth login` stored.",
        "HF_ENDPOINT": "Another Hub.",
        "HF_HUB_OFFLINE": "1: huggingface_hub asks nobody, so nothing can be staged from `hf://`.",
    },
    "Ray": {
        "RAY_ADDRESS": "The cluster to work on, where `--address` or the form names none; else the one on this machine.",
        "RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH": (
            "The token of a cluster that wants one, or its file (`~/.ray/auth_token`). Ray reads them; `scale-up` shows it "
            "to Serve's REST API."
        ),
        "RAY_DASHBOARD_ADDRESS": "Where `scale-up` finds Serve's REST API, if `target.dashboard` does not say.",
    },
    "Prefect": {
        "PREFECT_API_URL": (
            "The server: of the flows, of the rung `prefect`, of the event about a replica that falls back, of `doctor`."
        ),
        "PREFECT_API_AUTH_STRING PREFECT_API_KEY": "What lets us in there; the first one comes before the second.",
        "PREFECT_PROFILE PREFECT_PROFILES_PATH PREFECT_HOME": (
            "Where the three above are not set, the flows and `doctor` take them from the active profile. A replica "
            "reads no profile."
        ),
        (
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS PREFECT_LOGGING_EXTRA_LOGGERS "
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW"
        ): "Set by the flows, unless you set them: a patient start without a server, and our log in the run.",
    },
    "The engine": {
        "VLLM_CACHE_ROOT TRITON_HOME FLASHINFER_WORKSPACE_BASE": (
            "Set by the callback where it gives the engine a staged compile cache: what you set does not count then."
        ),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "Set to 0 with a cache that was captured so, on CPUs, unless you set it.",
        "XDG_CACHE_HOME": "Where an engine without a staged cache keeps what it compiles, as vLLM has it.",
        "VLLM_PLUGINS": "If you set it, `llm_prefetch` must be in it for parsers and models of your own.",
    },
}


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
