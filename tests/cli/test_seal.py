"""`publish --manifest-only`: for files that are at the origin already."""

from __future__ import annotations

import pytest


def test_it_seals_what_is_there_and_prints_the_version(run, model):
    done = run("publish", "--manifest-only", f"file://{model}", "--json")
    assert done.code == 0
    assert (
        done.json["version"]
        == run("publish", model, f"file://{model}", "--dry-run", "--json").json["version"]
    )
    assert (model / ".llm-prefetch/manifest.json").exists()


@pytest.mark.parametrize("arguments", [["--manifest-only", "a", "file:///b"], ["file:///b"]])
def test_source_and_manifest_only_exclude_each_other(run, arguments):
    done = run("publish", *arguments)
    assert done.code == 2
    assert "--manifest-only URI" in done.err
