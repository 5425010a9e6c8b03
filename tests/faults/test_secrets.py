"""No secret of a URI, a header, the environment or an answer is seen again: not in logs, files, output or errors."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from llm_prefetch import manifest as manifests
from llm_prefetch.cli import main
from llm_prefetch.errors import PrefetchError
from llm_prefetch.spec import load_spec
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store
from tests.samples import FILES, make_manifest, only_record, tree

pytestmark = pytest.mark.cloud

SECRET = "S3cr3tS3cr3tS3cr3t"
LOGIN = base64.b64encode(f"me:{SECRET}".encode()).decode()
KEY = base64.b64encode(SECRET.encode()).decode()


@dataclass
class Echo:
    """A server that gives `FILES`, or repeats all it was asked in an error."""

    url: str = ""
    status: int = 0
    """What it answers to everything; 0 is the file that was asked for."""
    location: str = ""
    seen: list[str] = field(default_factory=list)
    """What it was asked, with the headers."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    echo: Echo

    def do_GET(self):
        asked = f"{self.requestline} {dict(self.headers)}"
        self.echo.seen.append(asked)
        files = {**FILES, manifests.PATH: make_manifest().to_json()}
        path = unquote(urlsplit(self.path).path).removeprefix("/prefix/")
        body, status = files.get(path, b""), self.echo.status or (200 if path in files else 404)
        if status >= 400:
            code = "<Code>InternalError</Code>"
            body = f"<Error>{code}<Message>{asked}</Message></Error>\n{asked}".encode()
        elif not self.echo.status and (found := self.headers.get("Range")):
            start, end = (int(number) for number in found.removeprefix("bytes=").split("-"))
            whole, status, body = len(body), 206, body[start : end + 1]
        self.send_response(status, f"refused {self.path}" if status >= 400 else None)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{whole}")
        if self.echo.location:
            self.send_header("Location", self.echo.location)
        self.send_header("X-Asked", asked)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"echo": made})) as server:
        server.daemon_threads = True
        server.block_on_close = False
        made.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        yield made
        server.shutdown()
        serving.join()


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", "1")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


CASES = {
    "https user": ("http://me:{secret}@{host}/prefix", {}),
    "https query": ("http://{host}/prefix?X-Amz-Signature={secret}&token={secret}", {}),
    "https fragment": ("http://{host}/prefix#{secret}", {}),
    "https that is no address": ("https://me:{secret}@host/with a blank?sig={secret}", {}),
    "http elsewhere": ("http://me:{secret}@example.invalid/x?sig={secret}", {}),
    "s3 keys": ("s3://bucket/prefix", {}),
    "s3 query": ("s3://bucket/prefix?X-Amz-Signature={secret}", {}),
    "s3 user": ("s3://key:{secret}@bucket/prefix", {}),
    "s3 in capitals": ("S3://key:{secret}@bucket/prefix", {}),
    "azure token": ("az://container/prefix", {"AZURE_STORAGE_SAS_TOKEN": "sv=2024-01-01&sp=rl&sig={secret}"}),
    "azure key": ("az://container/prefix", {"AZURE_STORAGE_ACCOUNT_KEY": "{key}"}),
    "azure broken key": ("az://container/prefix", {"AZURE_STORAGE_ACCOUNT_KEY": "{secret}"}),
    "azure query": (
        "abfss://container@account.dfs.core.windows.net/prefix?sig={secret}",
        {"AZURE_STORAGE_SAS_TOKEN": "sv=2024-01-01&sp=rl&sig={secret}"},
    ),
    "azure connection string": (
        "az://container/prefix",
        {"AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint={url};AccountName=account;AccountKey={key}"},
    ),
    "google key": ("gs://bucket/prefix", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{{"private_key": "{secret}"}}'}),
    "google query": ("gs://anonymous@bucket/prefix?X-Goog-Signature={secret}", {"GOOGLE_BASE_URL": "{url}"}),
    "hub token": ("hf://org/repo", {"HF_TOKEN": "hf_{secret}", "HF_ENDPOINT": "{url}"}),
    "hub query": ("hf://org/repo?token={secret}", {}),
    "unknown scheme": ("ftp://me:{secret}@host/x?token={secret}", {}),
    "no scheme": ("me:{secret}@host/x", {}),
}


@dataclass
class Attempt:
    """What is staged, and all that can be seen of it."""

    folder: Path
    uri: str

    @property
    def spec(self) -> Path:
        path = self.folder / "spec.yaml"
        path.write_text(
            yaml.safe_dump({"deployment": "llama", "artifacts": [{"name": "w", "uri": self.uri}]})
        )
        return path


@pytest.fixture
def attempt(echo, tmp_path, monkeypatch):
    """Make one of a case."""
    filled = {
        "secret": SECRET,
        "key": KEY,
        "url": echo.url,
        "host": echo.url.removeprefix("http://"),
    }
    monkeypatch.setenv("AWS_ENDPOINT_URL", echo.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"key{SECRET}")
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"token{SECRET}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", echo.url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")

    def make(case: str) -> Attempt:
        uri, env = CASES[case]
        for name, value in env.items():
            monkeypatch.setenv(name, value.format(**filled))
        return Attempt(tmp_path, uri.format(**filled))

    return make


def assert_no_secret(text: object) -> None:
    for one in (SECRET, LOGIN, KEY):
        assert one not in str(text)


def _of_ours(caplog):
    return [
        logging.Formatter().format(record)
        for record in caplog.records
        if record.name.startswith("llm_prefetch")
    ]


@pytest.mark.parametrize("status", [0, 301, 403, 409])
@pytest.mark.parametrize("case", CASES)
def test_a_staging_that_fails_repeats_no_secret(attempt, echo, caplog, capsys, tmp_path, case, status):
    caplog.set_level(logging.DEBUG)
    echo.status = status
    made = attempt(case)
    codes = [
        main([command, str(made.spec), "--root", str(tmp_path / "store"), *options])
        for command in ("stage", "plan")
        for options in ([], ["--json"])
    ]
    assert status == 0 or all(codes), "nothing failed"
    printed = capsys.readouterr()
    assert_no_secret(printed.out + printed.err)
    assert_no_secret(_of_ours(caplog))
    for path in (tmp_path / "store").rglob("*"):
        assert_no_secret(path)
        if path.is_file():
            assert_no_secret(path.read_bytes().decode("latin-1"))
    error = _error_of(made, tmp_path)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert_no_secret([str(one), repr(one), one.args, vars(one), pickle.dumps(one)])
        assert one.hint


def _error_of(made, tmp_path):
    try:
        stage(load_spec(str(made.spec)), open_store(tmp_path / "store", create=True))
    except PrefetchError as error:
        return error
    return PrefetchError("it was staged", hint="none")


@pytest.mark.parametrize("case", ["https user", "https query", "s3 keys", "azure token", "hub token"])
def test_the_cases_do_send_their_secrets(attempt, echo, case):
    """Otherwise there would be nothing to repeat."""
    echo.status = 403
    main(["stage", str(attempt(case).spec)])
    sent = " ".join(echo.seen)
    assert SECRET in sent or LOGIN in sent


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("case", ["s3 keys", "azure token", "https user", "https query"])
def test_an_origin_that_fails_with_an_answer_full_of_secrets_is_not_quoted(
    attempt, echo, capsys, tmp_path, case, status
):
    echo.status = status
    assert main(["stage", str(attempt(case).spec), "--root", str(tmp_path / "store")]) == 3
    printed = capsys.readouterr()
    assert_no_secret(printed.out + printed.err)
    assert "Authorization" not in printed.err
    ledger = tmp_path / "store/ledger/ledger.jsonl"
    assert "origin" in json.loads(ledger.read_text().splitlines()[0])["outcome"]
    assert_no_secret(ledger.read_text())


@pytest.mark.parametrize("case", ["https user", "https query"])
def test_what_is_staged_with_a_secret_holds_none(attempt, caplog, capsys, tmp_path, case):
    caplog.set_level(logging.DEBUG)
    made, root = attempt(case), tmp_path / "store"
    for command in (
        ["stage", made.spec],
        ["plan", made.spec, "--json"],
        ["ls"],
        ["ls", "--json"],
        ["verify", "--full", "--json"],
    ):
        assert main([*map(str, command), "--root", str(root)]) == 0
    printed = capsys.readouterr()
    assert_no_secret(printed.out + printed.err)
    assert_no_secret(_of_ours(caplog))
    record = only_record(open_store(root), "w")
    assert record.uri.endswith("/prefix")
    files = [path for path in root.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".json", ".jsonl", ".manifest"}
    assert tree(root / "artifacts/w" / record.version) == FILES
    for path in files:
        assert_no_secret(path.read_bytes().decode("latin-1"))


def test_a_redirect_to_an_address_that_cannot_be_asked_is_not_quoted(attempt, echo, capsys):
    echo.status, echo.location = 302, f"/odd place?X-Amz-Signature={SECRET}"
    assert main(["stage", str(attempt("https query").spec)]) == 3
    assert_no_secret(capsys.readouterr().err)


def test_a_spec_that_is_no_yaml_is_not_quoted(capsys, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(f"artifacts: [{{uri: 'https://me:{SECRET}@host/x?sig={SECRET}', name: x: y}}]\n")
    assert main(["stage", str(path)]) == 2
    assert_no_secret(capsys.readouterr().err)


def test_a_proxys_password_is_not_told(attempt, capsys, settings, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    settings.setenv("LLM_PREFETCH_ALLOW_HTTP", "1")
    settings.setenv("http_proxy", f"http://me:{SECRET}@{address}")
    made = attempt("https user")
    made.uri = "http://origin.test/prefix"
    assert main(["stage", str(made.spec), "--root", str(tmp_path / "store")]) == 3
    told = capsys.readouterr().err
    assert address in told
    assert_no_secret(told + (tmp_path / "store/ledger/ledger.jsonl").read_text())


def test_prefects_tables_hold_no_secret(attempt, echo, tmp_path):
    from llm_prefetch.cluster.reports import ClusterReport, Node, NodeReport

    for case, status in [("https query", 0), ("https query", 403), ("azure token", 403), ("s3 query", 403)]:
        echo.status = status
        node = Node("id", "10.0.0.1", "host")
        try:
            done = stage(load_spec(str(attempt(case).spec)), open_store(tmp_path / "store", create=True))
            report = NodeReport(node, done)
        except PrefetchError as error:
            report = NodeReport(node, error=pickle.loads(pickle.dumps(error)))
        assert report.ready == (status == 0)
        rows = ClusterReport((report,), 1).rows()
        assert rows[0]["error"] or status == 0
        assert_no_secret(json.dumps(rows) + repr(report))
