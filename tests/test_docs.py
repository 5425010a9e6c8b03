"""The documentation says what the code does: generated pages are current, examples are valid, links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from llm_prefetch.errors import SpecError
from llm_prefetch.serve.lifecycle import HOOKS, LifecycleCallback
from llm_prefetch.serve.lifecycle.options import parse_members
from llm_prefetch.serve.options import parse_options
from llm_prefetch.spec import Artifact, parse_spec

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to" / "from-empty-server-to-warm-scale-up.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVE = sorted((ROOT / "deployments" / "serve").glob("*.yaml"))


@cache
def generator():
    source = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "text"), generator().pages().items())
def test_a_generated_page_is_what_the_code_says(name, text):
    assert (ROOT / "docs" / "reference" / name).read_text() == text, "run: python docs/generate.py"


# Links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading_in_it(page):
    broken = []
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        target = page.parent / path if path else page
        if "://" in path:
            continue
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert broken == []


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        shown = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def test_anchors_are_made_as_github_makes_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# What it's `worth`, in 2_000 files: a [link](x.md)\n## Twice\n## Twice\n```sh\n# no heading\n```\n"
    )
    assert anchors(page) == {"what-its-worth-in-2_000-files-a-link", "twice", "twice-1"}


# YAML

NOT_OURS = {
    ("scale-up.md", "applications"): "shows how the number of replicas is said, without a callback",
    (
        "parsers-and-models.md",
        "engine_kwargs",
    ): "the names that parsers are then known by; the callback beside is parsed",
    ("ways-of-loading.md", "model_loading_config"): "how Ray is told to stream; it has no callback in it",
}
"""Blocks that hold nothing which this package reads, by page and first key."""


def blocks(page: Path) -> list[str]:
    """The YAML in a page, or the page that is YAML."""
    if page.suffix == ".yaml":
        return [page.read_text()]
    found = re.findall(r"^( *)```yaml\n(.*?)^\1```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What the package reads in a piece of YAML: specs, artifacts and the arguments of callbacks."""
    if isinstance(value, list):
        for one in value:
            yield from parts(one)
    elif isinstance(value, dict) and {"deployment", "artifacts"} <= value.keys():
        yield "spec", value
    elif isinstance(value, dict) and "callback_class" in value:
        yield value["callback_class"], value.get("callback_kwargs", {})
        yield from parts(value.get("callback_kwargs", {}).get("callbacks"))
    elif isinstance(value, dict):
        for key, below in value.items():
            if key == "artifacts":
                yield from (("artifact", one) for one in below)
            elif key == "callback_kwargs":
                yield PREFETCH, below
            else:
                yield from parts(below)


def parse(value: Any) -> int:
    """Give each part to the package; how many there are."""
    found = list(parts(value))
    for kind, arguments in found:
        PARSERS.get(kind, dict)(arguments)
    return len(found)


PREFETCH = "llm_prefetch.serve.PrefetchCallback"
PARSERS = {
    "spec": lambda value: parse_spec(value, "docs"),
    "artifact": Artifact.model_validate,
    PREFETCH: parse_options,
    "llm_prefetch.serve.LifecycleCallback": parse_members,
}


@pytest.mark.parametrize(
    "page", [page for page in [*PAGES, *SERVE] if blocks(page)], ids=lambda page: page.name
)
def test_every_yaml_block_is_one_that_the_package_takes(page):
    for block in blocks(page):
        whole = re.sub(r"b3-\w+\.\.\.", "b3-" + "0" * 64, block).replace(
            "*pool", "pool"
        )  # as the pages cut them
        value = yaml.safe_load(whole)
        nothing = isinstance(value, dict) and (page.name, next(iter(value))) in NOT_OURS
        assert (parse(value) == 0) == nothing, block


def test_a_block_with_a_wrong_field_would_be_found():
    """In each of the places in which pages have them."""
    wrong = {"deployment": "d", "artifacts": [{"name": "w", "uri": "file:///x", "surprise": 1}]}
    chain = {"callback_class": "llm_prefetch.serve.LifecycleCallback"}
    inside = {"callback_class": PREFETCH, "callback_kwargs": {"deployment": "stage/d", "on_mis": []}}
    for value in (
        wrong,
        [{"parameters": {"spec": wrong}}],
        {"artifacts": wrong["artifacts"]},
        {"callback_kwargs": inside["callback_kwargs"]},
        {"applications": [{"args": {"llm_configs": [{"callback_config": inside}]}}]},
        {"callback_config": {**chain, "callback_kwargs": {"callbacks": [inside]}}},
        {"callback_config": {**chain, "callback_kwargs": {"callbacks": [{"callback_clas": "x.Y"}]}}},
    ):
        with pytest.raises((SpecError, ValidationError), match=r"surprise|on_mis|callback_clas"):
            parse(value)


def test_the_spec_in_the_readme_is_valid():
    (text,) = re.findall(r"```yaml\n# spec.yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert parse_spec(yaml.safe_load(text), "README").deployment == "llama-3-8b"


@pytest.mark.parametrize("page", [ROOT / "README.md", HOW_TO, *SERVE], ids=lambda page: page.name)
def test_a_serve_yaml_names_the_deployment_of_the_staging_flow(page):
    (text,) = [block for block in blocks(page) if "applications:" in block]
    callbacks = [value for kind, value in parts(yaml.safe_load(text)) if kind == PREFETCH]
    assert callbacks
    assert all(parse_options(value).deployment.startswith("stage/") for value in callbacks)


# What the reference says of the code


def test_the_hooks_that_are_said_to_need_our_server_are_not_called_without():
    called = []
    kind = type("All", (), {hook: lambda self, ctx, hook=hook: called.append(hook) for hook in HOOKS})
    engine = SimpleNamespace(actual_hf_model_id="/staged/weights")
    config = SimpleNamespace(get_engine_config=lambda: engine)
    callback = LifecycleCallback(llm_config=config, callbacks=[{"callback_class": kind}])
    for hook in ("on_before_node_init", "on_after_node_init"):
        asyncio.run(callback.run_callback(hook))
    assert called == [hook for hook in HOOKS if hook not in generator().ONLY_IN_SERVER]


INTERNAL = {"LLM_PREFETCH_CAPTURE", "LLM_PREFETCH_PLUGINS"}
"""Set by one of our processes for another one."""
NEVER_READ = {
    "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "VLLM_NO_USAGE_STATS", "VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_PER_WORKER_GPUS",
}  # fmt: skip
"""Of vLLM's: names in a compile cache's key, and what a plugin's trial is run with."""
VARIABLE = re.compile(
    r"(LLM_PREFETCH|AWS|AZURE|AZURITE|GOOGLE|STORAGE|GCSFS|HF|RAY|PREFECT|SSL|VLLM|TRITON|FLASHINFER|TORCHINDUCTOR|XDG|CUDA)"
    r"_[A-Z_]+"
)


def test_every_environment_variable_in_the_code_is_in_the_settings():
    files = [*(ROOT / "llm_prefetch").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]
    texts = (
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    used = {text for text in texts if VARIABLE.fullmatch(text)}
    named = set(re.findall(r"`([A-Z_]+)`", generator().pages()["settings.md"]))
    assert {"HF_ENDPOINT", "RAY_AUTH_TOKEN_PATH", "AWS_CA_BUNDLE"} <= used
    assert used - named - INTERNAL - NEVER_READ == set()
    assert not (INTERNAL | NEVER_READ) - used
