"""`https://` and `http://`, against real web servers in this process."""

from __future__ import annotations

import base64
import ssl
import subprocess
from collections.abc import Iterator

import pytest

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import (
    ManifestError,
    OriginAccessError,
    OriginChangedError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
    UnsupportedOriginError,
)
from llm_prefetch.ledger import read
from llm_prefetch.live import check_deployment
from llm_prefetch.manifest import CHUNK_BYTES
from llm_prefetch.origins import ObjectInfo, https, open_origin
from llm_prefetch.resolve import resolve
from llm_prefetch.stage import stage
from tests.real.web import Web, web_server
from tests.samples import FILES, TOTAL, make_artifact, make_manifest, make_spec, raises, tree

pytestmark = pytest.mark.usefixtures("no_leaks")
ODD = {
    name: name.encode()
    for name in ("a b", "a+b", "a%20b", "a#b", "a?b=c&d", "ünï", "~x", "a'\"b", "*", "model")
}


@pytest.fixture
def web(no_leaks) -> Iterator[Web]:
    with web_server() as running:
        yield running


@pytest.fixture
def cdn(no_leaks) -> Iterator[Web]:
    with web_server() as running:
        yield running


def _read(origin, item, start=0, length=None):
    reader = origin.reader()
    try:
        data = bytearray(item.size if length is None else length)
        body, at = reader.open_range(item, start, len(data)), 0
        while count := body.readinto(memoryview(data)[at:]):
            at += count
        return bytes(data[:at])
    finally:
        reader.close()


def test_a_manifest_lies_where_a_publication_puts_it():
    assert https._MANIFEST == manifests.PATH


@pytest.mark.parametrize("end", ["", "/", f"/{manifests.PATH}"])
def test_a_published_folder_is_staged_and_again_reads_only_the_manifest(web, store, end):
    files = {**FILES, **ODD, "big": bytes(range(256)) * (CHUNK_BYTES // 200)}
    uri = web.put("/models/model", files) + end
    report = stage(make_spec(uri), store)
    assert report.fetched_bytes == sum(map(len, files.values()))
    assert report.artifacts[0].version == make_manifest(files, CHUNK_BYTES).version
    assert tree(store.engine_path("llama", "weights").resolve()) == files
    assert check_deployment(store, "llama", full=True).ready
    web.requests.clear()
    assert stage(make_spec(uri), store).fetched_bytes == 0
    assert {asked.path for asked in web.requests} == {f"/models/model/{manifests.PATH}"}


def test_the_address_of_a_manifest_may_be_any_file_beside_the_data(web, store):
    web.put("/m", FILES, published=False)
    web.files["/m/manifest.json"] = make_manifest().to_json()
    stage(make_spec(f"{web.url}/m/manifest.json"), store)
    assert tree(store.engine_path("llama", "weights").resolve()) == dict(FILES)


def test_another_file_of_that_name_is_no_manifest(web):
    web.files["/m/manifest.json"] = b"{}"
    with raises(ManifestError, 3, f"{web.url}/m/manifest.json"):
        resolve(make_artifact(f"{web.url}/m/manifest.json"))


@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK_BYTES + 1])
def test_a_single_file_is_listed_by_its_name_and_staged(web, store, size):
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    web.files["/dir/a b.gguf"] = data
    uri = f"{web.url}/dir/a%20b.gguf"
    [found] = open_origin(uri).list()
    assert (found.path, found.size) == ("a b.gguf", size)
    assert bool(found.etag) == bool(size)
    assert stage(make_spec(uri), store).fetched_bytes == size
    assert tree(store.engine_path("llama", "weights").resolve()) == {"a b.gguf": data}
    web.requests.clear()
    assert stage(make_spec(uri), store).fetched_bytes == 0
    assert sum(asked.sent for asked in web.requests) < 10


@pytest.mark.parametrize("absent", [401, 403, 404, 410])
def test_a_manifest_that_is_refused_may_only_not_be_there(web, absent):
    web.absent = absent
    web.files["/x"] = b"123"
    assert [file.path for file in resolve(make_artifact(f"{web.url}/x")).content.files] == ["x"]


@pytest.mark.parametrize("path", ["/models", "/models/", "/"])
@pytest.mark.parametrize("page", [b"", b"<html>the index</html>"])
def test_a_folder_without_a_manifest_says_what_to_do(web, path, page):
    web.put("/models", FILES, published=False)
    web.page = page
    with raises(OriginNotFoundError, 3, "publish the folder with its manifest", "single file", web.url):
        resolve(make_artifact(web.url + path))


def test_a_folder_that_is_redirected_to_its_index_is_no_file(web):
    web.moved["/models"] = "/index/"
    web.files["/index/"] = b"plain text"
    with raises(OriginNotFoundError, 3, "cannot be listed"):
        resolve(make_artifact(f"{web.url}/models"))


def test_a_single_page_may_be_what_is_wanted(web):
    web.page = b"<html>"
    assert [info.path for info in open_origin(f"{web.url}/x.html").list()] == ["x.html"]


def test_a_signed_query_goes_with_every_request_and_into_no_text(web, store):
    web.query = "sig=s3cret%2Fx&se=1"
    web.put("/p", FILES)
    uri = f"{web.url}/p?{web.query}#s3cret"
    stage(make_spec(uri), store)
    assert {asked.query for asked in web.requests} == {web.query}
    written = b"".join(file.read_bytes() for file in store.root.rglob("*") if file.is_file())
    assert b"s3cret" not in written
    assert b"/p" in written
    web.query = "sig=another"
    for artifact in (make_artifact(uri), make_artifact(uri.replace("#", "#x"), version="b3-" + "0" * 64)):
        with raises(OriginAccessError, 3, f"{web.url}/p") as caught:
            resolve(artifact)
        assert "s3cret" not in str(caught.value)


def test_errors_of_what_was_resolved_hold_no_secret(web, store):
    web.files["/x"] = b"1"
    with raises(OriginNotFoundError, 3, "/none/y") as caught:
        resolve(make_artifact(f"{web.url.replace('//', '//me:s3cret@')}/none/y?s3cret"))
    assert "s3cret" not in str(caught.value)
    web.files[f"/x/{manifests.PATH}"] = b"{}"
    with raises(ManifestError, 3) as caught:
        resolve(make_artifact(f"{web.url}/x?s3cret"))
    assert "s3cret" not in str(caught.value)


def test_the_user_of_the_address_is_logged_in(web, store):
    web.login = f"Basic {base64.b64encode(b'me:p@ss s3cret').decode()}"
    web.put("/p", FILES)
    assert (
        stage(make_spec(web.url.replace("//", "//me:p%40ss%20s3cret@") + "/p"), store).fetched_bytes == TOTAL
    )
    assert not [event for event in read(store) if "s3cret" in str(event)]
    with raises(OriginAccessError, 3, "user", web.url):
        resolve(make_artifact(f"{web.url}/p"))


def test_a_redirect_is_followed_once_and_no_login_goes_with_it(web, cdn, store):
    cdn.put("/data", {**FILES, "big": bytes(CHUNK_BYTES * 3)})
    web.moved["/data"] = f"{cdn.url.replace('//', '//evil:user@')}PATH?X-Signature=1"
    stage(make_spec(web.url.replace("//", "//me:s3cret@") + "/data"), store)
    assert all("authorization" in asked.headers for asked in web.requests)
    assert cdn.requests
    assert not [asked for asked in cdn.requests if "authorization" in asked.headers]
    big = [asked for asked in web.requests if asked.path == "/data/big"]
    assert len(big) <= 3  # chunks that are asked for at once may each find the way
    assert check_deployment(store, "llama", full=True).ready


def test_ranges_after_the_first_go_straight_to_where_the_file_is(web, cdn):
    cdn.files["/x"] = bytes(range(100))
    web.moved["/x"] = f"{cdn.url}PATH"
    origin = open_origin(f"{web.url}/x")
    [item] = origin.list()
    before = len(web.requests)
    for start in (0, 20, 40):
        assert _read(origin, item, start, 10) == bytes(range(start, start + 10))
    assert [asked.path for asked in web.requests[before:]] == ["/x"]


def test_an_address_that_expired_is_asked_for_again(web, cdn):
    cdn.files["/x"], cdn.query = b"1234", "sig=1"
    web.moved["/x"] = f"{cdn.url}/x?sig=1"
    origin = open_origin(f"{web.url}/x")
    [item] = origin.list()
    assert _read(origin, item) == b"1234"
    cdn.query, web.moved["/x"] = "sig=2", f"{cdn.url}/x?sig=2"
    assert _read(origin, item) == b"1234"
    cdn.query = "sig=3"
    with raises(OriginAccessError, 3, "'x'", web.url):
        _read(origin, item)


@pytest.mark.parametrize(("hops", "good"), [(5, True), (6, False)])
def test_redirects_end(web, hops, good):
    web.files["/0"] = b"data"
    web.moved.update({f"/{hop}": f"/{hop - 1}" for hop in range(1, hops + 1)})
    origin = open_origin(f"{web.url}/{hops}")
    if good:
        [item] = origin.list()
        assert _read(origin, item) == b"data"
    else:
        with raises(OriginError, 3, "302"):
            list(origin.list())


@pytest.mark.parametrize(
    "there", ["file:///etc/passwd", "ftp://host/x", "http://host:port/x", "https:///x", "http://["]
)
def test_a_redirect_to_anything_but_the_web_is_refused(web, there):
    web.moved["/x"] = there
    with raises(OriginError, 3, "redirects", web.url):
        list(open_origin(f"{web.url}/x").list())


@pytest.mark.parametrize(("tag", "modified"), [('"{}"', None), ('W/"{}"', None), ("", "CHANGES"), ("", None)])
def test_a_file_that_changed_since_it_was_listed_is_refused(web, tag, modified):
    web.tag, web.modified = tag, modified and "Sat, 21 Nov 2026 03:00:00 GMT"
    web.files["/x"] = b"1234"
    origin = open_origin(f"{web.url}/x")
    [item] = origin.list()
    assert _read(origin, item) == b"1234"
    web.files["/x"], web.modified = b"5678", modified and "Sat, 21 Nov 2026 04:00:00 GMT"
    if tag or modified:
        with raises(OriginChangedError, 3, "'x'", web.url):
            _read(origin, item)
    else:
        assert _read(origin, item) == b"5678"
    assert _read(origin, ObjectInfo("x", 4, "")) == b"5678"
    with raises(OriginChangedError, 3, "where 5 were expected"):
        _read(origin, ObjectInfo("x", 5, ""), 0, 2)


def test_a_server_without_ranges_serves_what_fits_a_chunk(web, store):
    web.ranges = False
    assert stage(make_spec(web.put("/p", FILES)), store).fetched_bytes == TOTAL
    web.files["/big"] = bytes(CHUNK_BYTES + 1)
    with raises(OriginError, 3, "ranges", web.url):
        stage(make_spec(f"{web.url}/big", deployment="other"), store)


def test_what_was_compressed_on_the_way_is_refused(web):
    web.files["/x.txt"] = b"123"
    origin = open_origin(f"{web.url}/x.txt")
    [item] = origin.list()
    web.encoding = "gzip"
    for act in (lambda: list(origin.list()), lambda: _read(origin, item)):
        with raises(OriginError, 3, "compresses", web.url):
            act()


@pytest.mark.parametrize(
    ("status", "kind"), [(500, OriginUnavailableError), (429, OriginUnavailableError), (400, OriginError)]
)
def test_a_server_that_fails_is_not_taken_for_an_empty_one(web, status, kind):
    web.absent = status
    with raises(kind, 3, str(status), web.url):
        resolve(make_artifact(f"{web.url}/x"))


@pytest.mark.parametrize(
    "uri",
    ["https://host", "https:///x", "https://[x/y", "https://h:port/x", "https://host/a b", "https://host/ü"],
)
def test_what_is_no_web_address_is_refused(uri):
    with raises(UnsupportedOriginError, 2, "not a web address"):
        open_origin(uri)


def test_plain_http_to_another_host_must_be_asked_for(monkeypatch):
    with raises(UnsupportedOriginError, 2, "LLM_PREFETCH_ALLOW_HTTP=1", "http://host/x") as caught:
        open_origin("http://me:s3cret@host/x?s3cret")
    assert "s3cret" not in str(caught.value)
    for host in ("localhost", "127.0.0.2:80", "[::1]:80"):
        open_origin(f"http://{host}/x")
    monkeypatch.setenv("LLM_PREFETCH_ALLOW_HTTP", "1")
    open_origin("http://host/x")


def test_https_checks_the_certificate_and_is_not_left_for_http(web, store, tmp_path, monkeypatch):
    options = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", *options, *names, "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with web_server(context) as secure:
        uri = secure.put("/p", FILES)
        with raises(OriginUnavailableError, 3, "certificate", secure.url):
            resolve(make_artifact(uri))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert stage(make_spec(uri), store).fetched_bytes == TOTAL
        web.files["/x"], secure.moved["/x"] = b"1", f"{web.url}/x"
        with raises(OriginError, 3, "redirects"):
            list(open_origin(f"{secure.url}/x").list())
