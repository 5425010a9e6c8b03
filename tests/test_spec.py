"""A spec is checked whole before anything happens, and what is wrong is said by its field."""

from __future__ import annotations

import io
import sys
import traceback

import pytest

from llm_prefetch.errors import SpecError
from llm_prefetch.spec import Policy, load_spec, parse_spec
from tests.samples import raises

GOOD = """
deployment: llama-3-8b
artifacts:
  - {name: weights, kind: model, uri: "s3://bucket/models/llama", exclude: ["original/*"]}
  - {name: compile, kind: compile-cache, uri: "s3://bucket/caches/llama"}
nodes: {labels: {ray.io/accelerator-type: A10G}}
policy: {bandwidth: 2GB/s, min_ready: all}
"""


def _data(**change):
    return {"deployment": "d", "artifacts": [{"name": "w", "uri": "file:///x"}], **change}


def test_the_spec_of_the_design_loads(tmp_path):
    (tmp_path / "spec.yaml").write_text(GOOD)
    spec = load_spec(str(tmp_path / "spec.yaml"))
    assert [artifact.kind for artifact in spec.artifacts] == ["model", "compile-cache"]
    assert spec.policy.bytes_per_second == 2e9


def test_a_dash_reads_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(GOOD))
    assert load_spec("-").deployment == "llama-3-8b"


def test_yaml_merges_are_understood(tmp_path):
    (tmp_path / "spec.yaml").write_text(
        "deployment: d\nartifacts:\n  - &base {name: w, uri: 'file:///x'}\n  - {<<: *base, name: v}\n"
    )
    assert [artifact.name for artifact in load_spec(str(tmp_path / "spec.yaml")).artifacts] == ["w", "v"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML"),
        ("a: 1\na: 2", "occurs twice"),
        ("a: {b: 1, b: 2}", "occurs twice"),
        ("a: 2024-13-01", "not YAML"),
        ("a: !!python/object:os.system x", "not YAML"),
        ("? [a]\n: b", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("", "not a mapping"),
        ("- a", "not a mapping"),
        ("just text", "not a mapping"),
    ],
)
def test_what_is_not_a_mapping_in_yaml_is_refused(tmp_path, text, says):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with raises(SpecError, 2, says, str(path)):
        load_spec(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with raises(SpecError, 2, "No such file", "missing.yaml"):
        load_spec(str(tmp_path / "missing.yaml"))
    with raises(SpecError, 2, "directory"):
        load_spec(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with raises(SpecError, 2, "UTF-8"):
        load_spec(str(tmp_path / "binary"))


def test_two_artifacts_of_one_name_are_refused():
    artifact = {"name": "w", "uri": "file:///x"}
    with raises(SpecError, 2, "artifacts", "'w'"):
        parse_spec(_data(artifacts=[artifact, artifact]), "here")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/a", ".a", "a b", "a\n", "a\0", "-a", "x" * 129]
)
def test_an_unsafe_name_is_refused(name):
    with raises(SpecError, 2, "artifacts[0].name"):
        parse_spec(_data(artifacts=[{"name": name, "uri": "file:///x"}]), "here")
    with raises(SpecError, 2, "deployment"):
        parse_spec(_data(deployment=name), "here")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"artifacts": []}, "artifacts"),
        ({"artifacts": [{"name": "w"}]}, "artifacts[0].uri"),
        ({"artifacts": [{"name": "w", "uri": "no scheme"}]}, "artifacts[0].uri"),
        ({"artifacts": [{"name": "w", "uri": "s3://"}]}, "artifacts[0].uri"),
        ({"artifacts": [{"name": "w", "uri": "file:///x", "kind": "brain"}]}, "artifacts[0].kind"),
        ({"artifacts": [{"name": "w", "uri": "file:///x", "version": "latest"}]}, "artifacts[0].version"),
        ({"artifacts": [{"name": 1, "uri": "file:///x"}]}, "artifacts[0].name"),
        ({"artefacts": []}, "artefacts"),
        ({"policy": {"bandwidth": "fast"}}, "policy.bandwidth"),
        ({"policy": {"bandwidth": "2GB"}}, "policy.bandwidth"),
        ({"policy": {"bandwidth": "0GB/s"}}, "policy.bandwidth"),
        ({"policy": {"bandwidth": "0.0B/s"}}, "policy.bandwidth"),
        ({"policy": {"min_ready": "101%"}}, "policy.min_ready"),
        ({"policy": {"min_ready": "most"}}, "policy.min_ready"),
        ({"policy": {"min_ready": 0}}, "policy.min_ready"),
        ({"nodes": {"resources": {"GPU": "many"}}}, "nodes.resources.GPU"),
    ],
)
def test_a_field_that_does_not_fit_is_named(change, field):
    with raises(SpecError, 2, field, "here"):
        parse_spec(_data(**change), "here")


def test_the_number_of_further_mistakes_is_told():
    with raises(SpecError, 2, "(and 1 more)"):
        parse_spec({"deployment": "."}, "here")


@pytest.mark.parametrize(
    ("text", "number"),
    [("500MB/s", 5e8), ("2 GiB/s", 2 * 2**30), ("1.5KB/s", 1500), ("7B/s", 7), ("1TB/s", 1e12), (None, None)],
)
def test_bandwidth_is_read_in_decimal_and_binary_units(text, number):
    assert Policy(bandwidth=text).bytes_per_second == number


@pytest.mark.parametrize(
    ("min_ready", "needed"),
    [("all", 7), ("3", 3), (3, 3), ("50%", 4), ("1%", 1), ("100%", 7), ("0%", 0)],
)
def test_how_many_of_seven_nodes_must_be_ready(min_ready, needed):
    assert Policy(min_ready=min_ready).needed(7) == needed


def test_the_schema_carries_the_constraints_that_a_form_needs():
    schema = parse_spec(_data(), "here").model_json_schema()
    artifact = schema["$defs"]["Artifact"]["properties"]
    assert {"pattern"} <= set(artifact["name"])
    assert {"pattern"} <= set(artifact["uri"])
    assert "enum" in artifact["kind"]
    assert all("description" in field for field in artifact.values())


SECRET = "hunter2-or-so"


@pytest.mark.parametrize(
    "uri",
    [f"S3://me:{SECRET}@bucket/x", f"HTTPS://host/x?X-Amz-Signature={SECRET}"],
    ids=["password", "signed"],
)
def test_a_uri_that_does_not_fit_is_told_without_its_secret(uri):
    data = _data(artifacts=[{"name": "w", "uri": uri}])
    try:
        parse_spec(data, "here")
    except SpecError:
        printed = traceback.format_exc()
    assert "artifacts[0].uri" in printed
    assert SECRET not in printed


def test_what_is_not_yaml_is_told_without_the_lines_around_it(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(f"api_key: {SECRET}: [\n")
    try:
        load_spec(str(path))
    except SpecError:
        printed = traceback.format_exc()
    assert "not YAML" in printed
    assert "line 1" in printed
    assert SECRET not in printed


def test_two_artifacts_with_one_link_are_refused():
    one = {"name": "w", "uri": "file:///x", "link": "/models/x"}
    with raises(SpecError, 2, "artifacts", "'w' and 'v' have the same link"):
        parse_spec(_data(artifacts=[one, {**one, "name": "v", "link": "/models//x"}]), "here")
    parse_spec(_data(artifacts=[one, {**one, "name": "v", "link": "/models/y"}]), "here")
