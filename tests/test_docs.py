"""The documentation says what the code does: generated pages are current, examples are valid, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from llm_prefetch.serve.options import parse_options
from llm_prefetch.spec import parse_spec

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to" / "from-empty-server-to-warm-scale-up.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def generator():
    source = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "text"), generator().pages().items())
def test_a_generated_page_is_what_the_code_says(name, text):
    assert (ROOT / "docs" / "reference" / name).read_text() == text, "run: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


def test_the_spec_in_the_readme_is_valid():
    (text,) = re.findall(r"```yaml\n# spec.yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert parse_spec(yaml.safe_load(text), "README").deployment == "llama-3-8b"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", HOW_TO, *sorted((ROOT / "deployments" / "serve").glob("*.yaml"))]
)
def test_the_callback_in_a_serve_yaml_is_valid(page):
    text = page.read_text()
    if page.suffix == ".md":
        (text,) = re.findall(r"```yaml\n(applications:.*?)```", text, re.DOTALL)
    for application in yaml.safe_load(text)["applications"]:
        for config in application["args"]["llm_configs"]:
            options = parse_options(config["callback_config"]["callback_kwargs"])
            assert options.deployment.startswith("stage/")
