"""Bad input gives one line that says what is wrong, where, and what to do; never a traceback, exit code 2."""

from __future__ import annotations

import os

import pytest

from tests.samples import make_folder

ONE = '[{name: w, uri: "file:///nowhere"}]'
SPECS = {
    "empty file": ("", "not a mapping", "'deployment:'"),
    "only a comment": ("# later", "not a mapping"),
    "a list": ("- a\n- b", "not a mapping"),
    "a word": ("llama", "not a mapping"),
    "not YAML": ("deployment: [", "not YAML", "line 1"),
    "a tab": ("deployment: a\n\tartifacts: []", "not YAML", "line 2"),
    "two documents": ("deployment: a\n---\ndeployment: b", "not YAML"),
    "an object of Python": ("!!python/object/apply:os.system [true]", "not YAML", "python/object"),
    "a key twice": (f"deployment: a\ndeployment: b\nartifacts: {ONE}", "'deployment' occurs twice", "line 2"),
    "a key twice further in": ('deployment: a\nartifacts: [{name: w, name: v, uri: "s3://x/y"}]', "'name'"),
    "control characters": ("deployment: a\0b", "not YAML"),
    "nested too deeply": ("[" * 5000, "not YAML"),
    "an unknown field": (f"deployment: a\nartifacts: {ONE}\nnode: {{}}", "node: there is no such field"),
    "an unknown field of an artifact": (
        'deployment: a\nartifacts: [{name: w, uri: "s3://x/y", url: z}]',
        "artifacts[0].url: there is no such field",
    ),
    "no artifacts": ("deployment: a", "artifacts: is missing"),
    "an empty list of artifacts": ("deployment: a\nartifacts: []", "artifacts: "),
    "no deployment": (f"artifacts: {ONE}", "deployment: is missing"),
    "no uri": ("deployment: a\nartifacts: [{name: w}]", "artifacts[0].uri: is missing"),
    "a number for a name": (f"deployment: 8\nartifacts: {ONE}", "deployment: ", "given 8"),
    "a deployment that is a path": (f"deployment: a/b\nartifacts: {ONE}", "not a name of letters", "'a/b'"),
    "a name that leads up": ('deployment: a\nartifacts: [{name: .., uri: "s3://x/y"}]', "'..'"),
    "a name that is hidden": ('deployment: a\nartifacts: [{name: .w, uri: "s3://x/y"}]', "'.w'"),
    "a name with a newline": ('deployment: a\nartifacts: [{name: "w\\n", uri: "s3://x/y"}]', r"'w\n'"),
    "a name without end": (f"deployment: {'a' * 9000}\nartifacts: {ONE}", "not a name", "..."),
    "the same name twice": (
        'deployment: a\nartifacts: [{name: w, uri: "s3://x/y"}, {name: w, uri: "s3://x/z"}]',
        "two artifacts are named 'w'",
    ),
    "an unknown kind": (
        'deployment: a\nartifacts: [{name: w, kind: lora, uri: "s3://x/y"}]', "artifacts[0].kind", "'lora'"
    ),
    "a path for a uri": ("deployment: a\nartifacts: [{name: w, uri: /mnt/x}]", "a URI such as s3://", "/mnt/x"),
    "an unknown scheme": ('deployment: a\nartifacts: [{name: w, uri: "gopher://x/y"}]', "unknown scheme gopher://"),
    "no bucket": ('deployment: a\nartifacts: [{name: w, uri: "s3:///y"}]', "not an S3 URI", "s3://bucket/"),
    "a relative folder": ('deployment: a\nartifacts: [{name: w, uri: "file://x/y"}]', "not an absolute path"),
    "a tag for a version": (
        'deployment: a\nartifacts: [{name: w, uri: "s3://x/y", version: v1}]', "64 hexadecimal digits", "'v1'"
    ),
    "patterns that leave nothing": (
        'deployment: a\nartifacts: [{name: w, uri: "file://MODEL", include: ["*.onnx"]}]', "leave no file"
    ),
    "a bandwidth in words": (f"deployment: a\nartifacts: {ONE}\npolicy: {{bandwidth: fast}}", "2GB/s", "'fast'"),
    "no bandwidth at all": (f"deployment: a\nartifacts: {ONE}\npolicy: {{bandwidth: 0MB/s}}", "nothing would"),
    "nobody ready": (f"deployment: a\nartifacts: {ONE}\npolicy: {{min_ready: '0'}}", "min_ready", "80%"),
    "more than all ready": (f"deployment: a\nartifacts: {ONE}\npolicy: {{min_ready: 120%}}", "'120%'"),
    "a selector that is a word": (f"deployment: a\nartifacts: {ONE}\nnodes: all", "nodes: "),
}  # fmt: skip
for scheme in ("gs", "abfss", "az", "azure"):
    SPECS[f"{scheme} without a place"] = (
        f'deployment: a\nartifacts: [{{name: w, uri: "{scheme}://a_b@c/y"}}]', "URI", f"{scheme}://c/y"
    )  # fmt: skip


def _assert_one_line(done, *fragments):
    assert (done.code, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert line.startswith("llm-prefetch: ")
    assert len(line) < 600
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize("command", ["plan", "stage"])
@pytest.mark.parametrize(("text", "fragments"), [(text, rest) for text, *rest in SPECS.values()], ids=SPECS)
def test_a_bad_spec_is_refused_by_name_of_the_field(run, tmp_path, model, root, text, fragments, command):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.replace("MODEL", str(model)).encode())
    done = run(command, path)
    _assert_one_line(done, *fragments)
    assert command == "stage" or not root.exists()


@pytest.mark.parametrize("text", ["", "- a", "deployment: [", "deployment: a/b"])
def test_a_bad_spec_on_standard_input_says_where_it_came_from(run, text):
    _assert_one_line(run("plan", "-", stdin=text), "standard input")


def test_a_secret_in_a_uri_is_not_shown(run, tmp_path, write_spec):
    done = run("plan", write_spec("gopher://me:hunter2@host/x?token=hunter2"))
    _assert_one_line(done, "gopher://host/x")
    assert "hunter2" not in done.err


@pytest.mark.parametrize("command", ["plan", "stage"])
@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("nothing.yaml", "No such file"),
        ("folder", "Is a directory"),
        ("binary", "not UTF-8"),
        ("", "Is a directory"),
        ("binary/below", "Not a directory"),
    ],
)
def test_what_is_no_spec_file_is_refused(run, tmp_path, monkeypatch, command, name, fragment):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    _assert_one_line(run(command, name), fragment, "name a YAML file")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ([], ["COMMAND", "--help"]),
        (["upload"], ["'upload'", "publish", "rollback"]),
        (["--root", "/x", "ls"], ["llm-prefetch COMMAND [options]"]),
        (["plan"], ["SPEC", "llm-prefetch plan --help"]),
        (["stage"], ["SPEC"]),
        (["publish"], ["URI"]),
        (["publish", "x"], ["URI"]),
        (["rollback"], ["DEPLOYMENT"]),
        (["stage", "a.yaml", "b.yaml"], ["b.yaml"]),
        (["verify", "--ful"], ["--ful"]),
        (["ls", "--root"], ["--root"]),
        (["ls", "--root", ""], ["--root", "empty"]),
        (["ls", "--root", "~nobody-of-this-name/x"], ["--root", "no such home folder"]),
        (["rollback", "../../etc"], ["DEPLOYMENT", "'../../etc' is not a name"]),
        (["rollback", "a", "--to", ""], ["--to", "'' is not a name"]),
    ],
    ids=" ".join,
)
def test_a_slip_in_the_arguments_is_one_line_too(run, arguments, fragments):
    _assert_one_line(run(*arguments), *fragments)


def test_a_slip_in_the_arguments_is_data_where_data_was_asked_for(run):
    assert run("stage", "--json").json["error"]["code"] == "usage"


@pytest.mark.parametrize(
    ("what", "fragment"),
    [
        ("file", "not a folder"),
        ("empty", "empty"),
        ("pipe", "'fifo' is not a regular file"),
        ("gone", "no such"),
    ],
)
def test_only_a_folder_of_files_can_be_published(run, tmp_path, what, fragment):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    make_folder(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe" / "fifo")
    done = run("publish", tmp_path / what, f"file://{tmp_path}/origin")
    _assert_one_line(done, fragment, str(tmp_path / what))
    assert not (tmp_path / "origin").exists()


@pytest.mark.parametrize("uri", ["nowhere", "gopher://x", "gs:///x", "az:///x", "s3://", "file://relative"])
def test_there_is_no_publishing_to_what_is_no_origin(run, model, uri):
    _assert_one_line(run("publish", model, uri), uri)


@pytest.mark.parametrize("name", ["nobody", "../live/llama", "", ".", "/", "bundle-0", "no such.yaml"])
def test_there_is_no_verifying_what_is_not_there(run, staged, name):
    _assert_one_line(run("verify", name), "no deployment, artifact or spec", "llm-prefetch ls")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["nobody"], "no deployment 'nobody'"),
        (["llama", "--to", "ffffffff"], "no bundle"),
        (["llama", "--to", "bundle-"], "2 bundles"),
    ],
)
def test_there_is_no_rolling_back_to_what_is_not_there(run, two_generations, arguments, fragment):
    _assert_one_line(run("rollback", *arguments), fragment, "llm-prefetch ls")


def test_there_is_no_rolling_back_from_the_first_generation(run, staged):
    _assert_one_line(run("rollback", "llama"), "no earlier generation")


def test_a_user_without_a_home_is_told_to_name_the_root(run, monkeypatch):
    monkeypatch.delenv("LLM_PREFETCH_ROOT")
    monkeypatch.setenv("HOME", "~")  # what Python finds for a user id that nobody gave a home
    done = run("ls")
    assert (done.code, done.out) == (4, "")
    [line] = done.err.splitlines()
    assert "no home folder" in line
    assert "LLM_PREFETCH_ROOT" in line
