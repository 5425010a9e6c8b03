"""What a run tells when it has ended: the events, and the page in Markdown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llm_prefetch.cluster import ClusterReport, manifest_links, notices, plan_summary, summary
from llm_prefetch.errors import ClusterError, NotReadyError, OriginUnavailableError
from llm_prefetch.spec import Spec
from llm_prefetch.stage import StageReport
from tests.test_cluster_logic import NODES, failed, ready, spec


def found(node: int) -> Any:
    """A node on which there was nothing to do."""
    done = ready(NODES[node])
    assert done.report is not None
    (artifact,) = done.report.artifacts
    there = replace(artifact, fetched_bytes=0, reused_bytes=10)
    return replace(done, report=StageReport("llama", "bundle-1", False, (there,), 0.1))


def test_a_run_that_is_enough_is_announced_with_the_nodes_that_it_made_ready() -> None:
    report = ClusterReport((ready(NODES[0]), found(1), failed(NODES[2])), 2)
    bundle, node = notices("llama", report, None)
    assert (bundle.event, bundle.resource) == ("llm-prefetch.bundle.staged", "llm-prefetch.bundle.llama")
    assert bundle.payload == {
        "deployment": "llama", "bundle": "bundle-1", "versions": {"weights": ready(NODES[0]).report.artifacts[0].version},
        "nodes": 3, "ready": 2, "needed": 2, "failed": 1, "fetched_bytes": 7, "reused_bytes": 13,
        "error": "no-space", "message": "full (/mnt): free some",
    }  # fmt: skip
    assert (node.event, node.resource) == ("llm-prefetch.node.ready", "llm-prefetch.node.host0")
    assert node.payload == {
        "deployment": "llama", "bundle": "bundle-1", "address": "10.0.0.0", "host": "host0", "root": "/mnt/llm",
        "fetched_bytes": 7, "reused_bytes": 3, "seconds": 1.23,
    }  # fmt: skip
    assert len(bundle.related) + len(node.related) == 1


def test_a_run_that_found_everything_there_is_one_event() -> None:
    (bundle,) = notices("llama", ClusterReport((found(0), found(1)), 2), None)
    assert (bundle.event, bundle.payload["fetched_bytes"]) == ("llm-prefetch.bundle.staged", 0)


def test_a_run_that_failed_says_why_without_secrets() -> None:
    error = NotReadyError("1 of 2 nodes are ready, 2 are needed; token=s3cret", hint="mend it")
    bundle, node = notices("llama", ClusterReport((ready(NODES[0]), failed(NODES[1])), 2), error)
    assert bundle.event == "llm-prefetch.bundle.stage-failed"
    assert (bundle.payload["error"], bundle.payload["ready"]) == ("not-ready", 1)
    assert bundle.payload["message"].endswith("; token=[hidden] mend it")
    assert node.event == "llm-prefetch.node.ready"  # that much is true

    (alone,) = notices("llama", None, ClusterError("no Ray cluster answers", where="10.0.0.1:6379"))
    assert alone.event == "llm-prefetch.bundle.stage-failed"
    assert (alone.payload["error"], alone.payload["nodes"], alone.payload["versions"]) == ("cluster", 0, {})


def test_the_page_of_a_run_says_what_was_to_stage_and_what_became_of_it() -> None:
    report = ClusterReport((ready(NODES[0]), failed(NODES[1])), 1, frozenset({"weights"}))
    page = summary(spec("1"), report, None)
    version = ready(NODES[0]).report.artifacts[0].version
    lines = page.splitlines()
    assert lines[0] == "## `llama`: staged: 1 of 2 nodes ready, 1 needed"
    assert (
        f"| weights | model | `{version}` | 10 B | `s3://b/m` | `s3://b/m/.llm-prefetch/manifest.json` |"
        in lines
    )
    assert "| adapter | model | `as the origin has it` |  | `s3://b/a` |  |" in lines
    assert "Live: `bundle-1`" in lines
    assert "| 10.0.0.0 | HIT | 10 B | 7 B | 3 B | 1.2 |  |" in lines
    assert "| 10.0.0.1 | MISSING |  |  |  |  | full (/mnt): free some |" in lines
    assert lines.index("| 10.0.0.1 | MISSING |  |  |  |  | full (/mnt): free some |") < lines.index(
        "| 10.0.0.0 | HIT | 10 B | 7 B | 3 B | 1.2 |  |"
    )  # what needs a look comes first
    assert "What next" not in page


def test_the_page_of_a_run_that_failed_says_what_next() -> None:
    error = OriginUnavailableError("0 of 1 nodes\nare | ready", where="s3://b/m", hint="wait a little")
    page = summary(spec(), ClusterReport((failed(NODES[0], error),), 1), error)
    assert page.splitlines()[0] == "## `llama`: not staged: 0 of 1 node ready, 1 needed"
    assert "**origin-unavailable**: 0 of 1 nodes are \\| ready (`s3://b/m`)" in page
    assert (
        "**What next**: wait a little. The same again may succeed. What is done is kept on the nodes." in page
    )

    page = summary(spec(), None, ClusterError("no node matches", hint="mend the selector"))
    assert page.splitlines()[0] == "## `llama`: not staged"
    assert "**What next**: mend the selector. What is done is kept on the nodes." in page


def test_a_page_of_very_many_nodes_stays_readable() -> None:
    many = ClusterReport(tuple(ready(NODES[0]) for _ in range(1000)), 1000)
    page = summary(spec(), many, None)
    assert page.count("| HIT |") == 64
    assert page.endswith("936 nodes more are in the table.\n")


def test_only_a_published_manifest_that_a_browser_can_open_is_linked() -> None:
    uris = {
        "prefix": "https://host/models/llama/",
        "named": "https://host/models/llama/.llm-prefetch/manifest.json",
        "signed": "https://host/models/llama?sig=s3cret",
        "login": "https://user:s3cret@host/models/llama",
        "file": "https://host/adapter.bin",
        "bucket": "s3://b/m",
    }
    artifacts = [{"name": name, "uri": uri} for name, uri in uris.items()]
    parsed = Spec.model_validate({"deployment": "llama", "artifacts": artifacts})
    report = ClusterReport((), 0, frozenset(uris) - {"file"})
    link = "https://host/models/llama/.llm-prefetch/manifest.json"
    assert manifest_links(parsed, report) == {"prefix": link, "named": link}
    assert "s3cret" not in summary(parsed, report, None)


def test_the_page_of_a_dry_run_shows_the_plan_and_how_to_apply_it() -> None:
    rows = [
        {"node": "10.0.0.1", "fetch_bytes": 12, "error": ""},
        {"node": "10.0.0.2", "fetch_bytes": 0, "error": ""},
    ]
    page = plan_summary(spec(), "plan-0123456789ab", rows)
    assert page.splitlines()[0] == "## `llama`: the plan `plan-0123456789ab` for 2 nodes"
    assert "Nothing was staged." in page
    assert "`plan: plan-0123456789ab`" in page
    assert "| node | fetch_bytes | error |" in page
    assert "| 10.0.0.1 | 12 |  |" in page
