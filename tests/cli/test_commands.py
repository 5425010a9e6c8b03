"""Each command, as a person reads it and as a program does."""

from __future__ import annotations

import subprocess
import tomllib

import pytest
import yaml

from llm_prefetch import cli
from llm_prefetch.spec import parse_spec
from tests.cli.conftest import REPOSITORY
from tests.samples import FILES, TOTAL, flip_byte, make_folder, tree

VERSION_LENGTH = len("b3-") + 64


def _everything(folder):
    return sorted(folder.rglob("*")) if folder.exists() else None


def test_publish_prints_the_whole_version_because_it_is_what_a_spec_pins(run, model, tmp_path):
    done = run("publish", model, f"file://{tmp_path}/origin")
    assert done.code == 0
    first, second = done.out.splitlines()
    assert first == f"published 4 files, {TOTAL} B, to file://{tmp_path}/origin"
    assert second.startswith("version: b3-")
    assert len(second.removeprefix("version: ")) == VERSION_LENGTH
    published = tree(tmp_path / "origin")
    assert {path: published[path] for path in FILES} == FILES


def test_the_printed_version_can_be_pinned(run, model, tmp_path, write_spec):
    version = run("publish", model, f"file://{tmp_path}/origin", "--json").json["version"]
    spec = write_spec()
    spec.write_text(
        f'deployment: llama\nartifacts:\n- {{name: w, uri: "file://{tmp_path}/origin", version: {version}}}\n'
    )
    assert run("stage", spec).code == 0


def test_publish_as_data(run, model, tmp_path):
    uri = f"file://{tmp_path}/origin"
    done = run("publish", model, uri, "--json")
    assert done.json == {"uri": uri, "version": done.json["version"], "files": 4, "bytes": TOTAL, "kept": 0}
    assert done.err == ""


def test_a_dry_publish_names_the_version_and_writes_nothing(run, model, tmp_path):
    dry = run("publish", model, f"file://{tmp_path}/origin", "--dry-run")
    assert dry.code == 0
    assert dry.out.startswith("would publish 4 files")
    assert not (tmp_path / "origin").exists()
    real = run("publish", model, f"file://{tmp_path}/origin")
    assert real.out.splitlines()[1] == dry.out.splitlines()[1]


@pytest.mark.parametrize("command", [("plan",), ("stage", "--dry-run"), ("plan", "--json")])
def test_planning_writes_nothing_not_even_the_root(run, spec, tmp_path, command):
    root = tmp_path / "a" / "new" / "root"
    done = run(*command, spec, "--root", root)
    assert done.code == 0
    assert not (tmp_path / "a").exists()


def test_planning_on_a_staged_node_writes_nothing(run, staged, root):
    before = _everything(root), tree(root)
    assert run("plan", staged).code == 0
    assert (_everything(root), tree(root)) == before


def test_plan_says_what_would_be_fetched_and_what_is_free(run, spec):
    done = run("plan", spec)
    assert done.rows[0] == ["artifact", "version", "state", "files", "size", "fetch", "reuse"]
    assert done.rows[1][0] == "weights"
    assert done.rows[1][2:] == ["to stage", "4", f"{TOTAL} B", f"{TOTAL} B", "0 B"]
    assert done.out.splitlines()[-1].startswith(f"{TOTAL} B to fetch, ")
    assert done.out.splitlines()[-1].endswith(" free")


def test_plan_after_staging_says_that_nothing_is_left_to_fetch(run, staged):
    done = run("plan", staged)
    assert done.rows[1][2:] == ["committed", "4", f"{TOTAL} B", "0 B", f"{TOTAL} B"]
    assert done.out.splitlines()[-1].startswith("0 B to fetch")


def test_plan_as_data(run, spec):
    data = run("plan", spec, "--json").json
    [artifact] = data["artifacts"]
    assert data["deployment"] == "llama"
    assert (artifact["fetch_bytes"], artifact["reuse_bytes"], artifact["committed"]) == (TOTAL, 0, False)
    assert len(artifact["version"]) == VERSION_LENGTH


def test_plan_without_a_published_manifest_says_that_the_version_is_open(run, model, write_spec):
    spec = write_spec(f"file://{model}")
    assert run("plan", spec).rows[1][:3] == ["weights", "(none published)", "to stage"]
    assert run("plan", spec, "--json").json["artifacts"][0]["version"] == ""


def test_stage_says_what_it_did_and_what_is_live(run, spec):
    done = run("stage", spec)
    assert done.code == 0
    assert done.rows[0] == ["artifact", "version", "verdict", "fetched", "reused", "seconds"]
    assert (done.rows[1][0], *done.rows[1][2:5]) == ("weights", "HIT", f"{TOTAL} B", "0 B")
    assert done.rows[2][0].startswith("llama is now live with bundle-")


def test_staging_again_fetches_nothing(run, staged):
    done = run("stage", staged)
    assert done.rows[1][2:5] == ["HIT", "0 B", f"{TOTAL} B"]
    assert done.rows[2][0].startswith("llama is still live with bundle-")


def test_stage_as_data_and_its_talk_apart(run, spec):
    done = run("stage", spec, "--json")
    assert done.code == 0
    assert (done.json["deployment"], done.json["switched"]) == ("llama", True)
    [artifact] = done.json["artifacts"]
    assert (artifact["verdict"], artifact["fetched_bytes"], artifact["total_bytes"]) == ("HIT", TOTAL, TOTAL)


def test_a_spec_may_come_from_standard_input(run, spec):
    assert run("stage", "-", stdin=spec.read_text()).code == 0
    assert run("verify", "-", stdin=spec.read_text()).code == 0


def test_a_spec_may_be_json(run, tmp_path, spec):
    (tmp_path / "spec.json").write_text(
        f'{{"deployment": "j", "artifacts": [{{"name": "w", "uri": "file://{tmp_path}/origin"}}]}}'
    )
    assert run("stage", tmp_path / "spec.json").code == 0


@pytest.mark.parametrize("what", [[], ["llama"], ["weights"]], ids=["all", "deployment", "artifact"])
@pytest.mark.parametrize("full", [[], ["--full"]], ids=["quick", "full"])
def test_verify_of_what_is_right(run, staged, what, full):
    done = run("verify", *what, *full)
    assert done.code == 0
    assert done.rows[0] == ["artifact", "version", "verdict", "files", "size", "reason"]
    assert (done.rows[1][0], *done.rows[1][2:]) == ("weights", "HIT", "4", f"{TOTAL} B")
    data = run("verify", *what, *full, "--json").json
    assert data["ready"]
    assert [check["verdict"] for check in data["checks"]] == ["HIT"]


def test_verify_of_a_spec_that_pins_another_version_is_stale(run, staged, tmp_path):
    pin = f"b3-{'0' * 64}"
    staged.write_text(
        f'deployment: llama\nartifacts:\n- {{name: weights, uri: "file://{tmp_path}/origin", version: {pin}}}\n'
    )
    done = run("verify", staged)
    assert done.code == 1
    assert done.rows[1][2] == "STALE"
    assert pin in done.out


def test_verify_of_a_spec_with_an_artifact_that_is_not_staged_is_missing(run, staged, tmp_path, write_spec):
    done = run("verify", write_spec(f"file://{tmp_path}/origin", f"file://{tmp_path}/more", name="more.yaml"))
    assert done.code == 1
    assert [(row[0], row[-1]) for row in done.rows[2:]] == [("weights1", "not live in llama")]


def test_a_deployment_goes_before_an_artifact_and_both_before_a_file_of_that_name(
    run, staged, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("llama", "weights"):
        (tmp_path / name).write_text("not a spec: at all")
        assert run("verify", name).code == 0


def test_what_a_full_check_found_damaged_stays_so_until_it_is_staged_again(run, staged, root):
    [file] = root.glob("artifacts/weights/b3-*/layers/0/weights.bin")
    flip_byte(file)
    assert run("verify").code == 0, "no quick check can see it"
    assert run("verify", "--full").code == 1
    quick = run("verify", "llama")
    assert (quick.code, quick.rows[1][2]) == (1, "CORRUPT")
    assert run("ls", "--json").json["artifacts"][0]["verdict"] == "CORRUPT"
    assert run("stage", staged, "--json").json["artifacts"][0]["fetched_bytes"] > 0
    assert run("verify", "--full").code == 0


def test_ls_shows_what_is_staged_where_from_and_what_is_live(run, two_generations, tmp_path):
    first, second = two_generations
    done = run("ls")
    assert done.code == 0
    assert done.rows[0] == ["artifact", "version", "verdict", "files", "size", "live in", "from"]
    assert {row[-1] for row in done.rows[1:3]} == {f"file://{tmp_path}/origin", f"file://{tmp_path}/origin2"}
    assert [row[-2] for row in done.rows[1:3]].count("llama") == 1
    assert done.rows[-2] == ["deployment", "live", "before"]
    assert done.rows[-1] == ["llama", second[:19], first[:19]]


def test_tables_for_people_cut_versions_and_data_for_programs_does_not(run, staged):
    [artifact] = run("ls", "--json").json["artifacts"]
    assert len(artifact["version"]) == VERSION_LENGTH
    assert run("ls").rows[1][1] == artifact["version"][:15]


def test_ls_as_data(run, two_generations, root):
    data = run("ls", "--json").json
    assert data["root"] == str(root)
    assert data["deployments"] == [
        {"name": "llama", "bundle": two_generations[1], "history": two_generations}
    ]
    assert sorted(artifact["live"] for artifact in data["artifacts"]) == [[], ["llama"]]


def test_an_empty_store_says_so(run, store):
    listed = run("ls")
    assert (listed.code, listed.out) == (0, "")
    assert "nothing is staged" in listed.err
    assert run("ls", "--json").json == {"root": str(store.root), "deployments": [], "artifacts": []}


def test_where_nothing_is_staged_the_check_says_no(run, store):
    done = run("verify")
    assert done.code == 1
    assert "nothing is staged" in done.err
    assert run("verify", "--json").json == {"ready": False, "checks": []}


def test_rollback_goes_to_the_generation_before_and_ls_shows_it(run, two_generations):
    first, second = two_generations
    done = run("rollback", "llama")
    assert (done.code, done.out) == (0, f"llama went back from {second[:19]} to {first[:19]}\n")
    assert run("ls", "--json").json["deployments"][0]["bundle"] == first


def test_a_dry_rollback_switches_nothing(run, two_generations, root):
    first, second = two_generations
    before = tree(root)
    done = run("rollback", "llama", "--dry-run")
    assert (done.code, done.out) == (0, f"llama would go back from {second[:19]} to {first[:19]}\n")
    assert run("ls", "--json").json["deployments"][0]["bundle"] == second
    assert tree(root) == before


@pytest.mark.parametrize("cut", [lambda name: name, lambda name: name[:19], lambda name: name[7:15]])
def test_rollback_takes_what_ls_prints_as_the_bundle(run, two_generations, cut):
    first, second = two_generations
    done = run("rollback", "llama", "--to", cut(first), "--json")
    assert done.code == 0
    assert (done.json["from"], done.json["to"]) == (second, first)
    assert [member["name"] for member in done.json["members"]] == ["weights"]


def test_what_was_rolled_back_can_be_gone_forward_to_by_its_name(run, two_generations):
    assert run("rollback", "llama").code == 0
    assert run("rollback", "llama", "--to", two_generations[1]).code == 0
    assert run("ls", "--json").json["deployments"][0]["bundle"] == two_generations[1]


def test_the_root_may_come_from_the_option_or_the_environment(run, spec, tmp_path, monkeypatch):
    assert run("stage", spec, "--root", tmp_path / "elsewhere").code == 0
    monkeypatch.setenv("LLM_PREFETCH_ROOT", str(tmp_path / "elsewhere"))
    assert run("verify", "llama").code == 0


def test_a_relative_root_is_taken_from_where_the_user_stands(run, spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("stage", spec, "--root", "here").code == 0
    assert (tmp_path / "here" / "LAYOUT").is_file()


def test_what_a_table_shows_is_printed_as_it_is(run, tmp_path, write_spec):
    folder = make_folder(tmp_path / "[red]x[/red] :smile:")
    assert run("stage", write_spec(f"file://{folder}")).code == 0
    assert f"file://{folder}" in run("ls").out


def test_long_rows_are_not_wrapped_in_a_pipe(run, tmp_path, write_spec):
    folder = make_folder(tmp_path / ("long" * 50) / ("longer" * 35))
    assert run("stage", write_spec(f"file://{folder}")).code == 0
    done = run("ls")
    assert len(done.rows) == 5
    assert done.rows[1][-1] == f"file://{folder}"


def test_help_is_for_a_person_who_has_never_seen_it(run):
    done = run("--help")
    assert done.code == 0
    for word in ("publish", "plan", "stage", "verify", "ls", "rollback", "exit codes", "s3://bucket/"):
        assert word in done.out


@pytest.mark.parametrize("command", ["publish", "plan", "stage", "verify", "ls", "rollback"])
def test_every_command_explains_itself(run, command):
    done = run(command, "--help")
    assert done.code == 0
    assert f"usage: llm-prefetch {command}" in done.out
    assert "--json" in done.out


def test_what_exit_code_3_stands_for_and_where_publish_writes_to_is_told_in_full(run):
    assert "3 origin, network or cluster" in run("--help").out
    text = run("publish", "--help").out
    assert [scheme for scheme in ("s3", "gs", "abfss", "az", "file") if f"{scheme}://" not in text] == []


def test_the_example_of_stage_is_a_spec_that_stage_takes(run):
    text = run("stage", "--help").out
    example = text[text.index("<<END\n") + len("<<END\n") : text.index("  END\n")]
    assert parse_spec(yaml.safe_load(example), "the help").deployment == "llama-3-8b"


def test_the_version_of_the_tool(run):
    assert run("--version").out.startswith("llm-prefetch ")


def test_the_console_script_is_this_function():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"llm-prefetch": f"{cli.__name__}:{cli.main.__name__}"}


def test_as_a_process_data_and_talk_go_apart(spawn, staged):
    with spawn("verify", "--full", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out.startswith(b"{")


def test_a_reader_that_has_enough_is_no_error(spawn, staged):
    with spawn("ls", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdout = None
        err = process.communicate()[1]
    assert (process.returncode, err) == (0, b"")
