"""The lean reader over TLS, against a real server with a certificate of its own."""

from __future__ import annotations

import random
import ssl
import subprocess

import pytest

from llm_prefetch.errors import OriginUnavailableError
from llm_prefetch.origins import ObjectInfo
from llm_prefetch.origins.ranged_http import HttpReader
from tests.origins.misbehaving import DATA, ITEM, WHERE, Server
from tests.samples import raises

pytestmark = pytest.mark.usefixtures("no_leaks")
LARGE = random.Random(1).randbytes(3_000_001)  # many records, and no whole number of them


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    options = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    argv = ["openssl", "req", *options, *names, "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "cert.pem"


@pytest.fixture
def server(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with Server(tls=context).running() as running:
        yield running


@pytest.fixture
def reader(server):
    made = HttpReader(lambda path: f"{server.url}{path}", WHERE, 5.0)
    yield made
    made.close()


@pytest.fixture(params=["AWS_CA_BUNDLE", "SSL_CERT_FILE"])
def trusted(request, certificate, monkeypatch):
    monkeypatch.setenv(request.param, str(certificate))


def _take(body, piece):
    taken, buffer = b"", memoryview(bytearray(piece))
    while count := body.readinto(buffer):
        taken += bytes(buffer[:count])
    return taken


def _send_large(request):
    headers = {"Content-Range": f"bytes 0-{len(LARGE) - 1}/{len(LARGE)}", "Content-Length": len(LARGE)}
    request.send("206 Partial Content", headers, LARGE)


def test_a_server_that_nothing_vouches_for_is_not_read(reader):
    with raises(OriginUnavailableError, 3, "certificate", WHERE):
        reader.open_range(ITEM, 0, 10)


def test_a_name_that_the_certificate_does_not_hold_is_not_read(server, trusted):
    reader = HttpReader(lambda path: f"{server.url}{path}".replace("127.0.0.1", "localhost"), WHERE, 5.0)
    with raises(OriginUnavailableError, 3, "certificate", WHERE):
        reader.open_range(ITEM, 0, 10)


def test_ranges_share_a_connection(server, reader, trusted):
    for start in range(0, 100, 10):
        assert _take(reader.open_range(ITEM, start, 10), 7) == DATA[start : start + 10]
    assert (len(server.requests), server.connections) == (10, 1)


@pytest.mark.parametrize("piece", [10_000, 2**18, 2**22])
def test_a_body_of_many_records_arrives_whole_in_pieces_of_any_size(server, reader, trusted, piece):
    server.answers += [_send_large]
    body = reader.open_range(ObjectInfo("x", len(LARGE), ""), 0, len(LARGE))
    assert _take(body, piece) == LARGE
    assert _take(reader.open_range(ITEM, 0, 10), 7) == DATA[:10]
    assert server.connections == 1


def _cut_after(count):
    def answer(request):
        headers = {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA)}", "Content-Length": len(DATA)}
        request.send("206 Partial Content", headers, DATA[:count])
        raise ConnectionAbortedError

    return answer


@pytest.mark.parametrize("count", [0, 1000])
def test_an_end_without_a_farewell_in_the_middle_of_a_body_is_a_lost_connection(
    server, reader, trusted, count
):
    server.answers += [_cut_after(count)]
    with raises(OriginUnavailableError, 3, "connection failed", WHERE):
        _take(reader.open_range(ITEM, 0, len(DATA)), 2**18)
    assert _take(reader.open_range(ITEM, 0, len(DATA)), 2**18) == DATA


def _answer_and_leave(request):
    request.send_range()
    raise ConnectionAbortedError


def test_a_connection_that_the_server_closed_meanwhile_is_opened_anew(server, reader, trusted):
    server.answers += [_answer_and_leave]
    for _ in range(2):
        assert _take(reader.open_range(ITEM, 0, len(DATA)), 2**18) == DATA
    assert server.connections == 2


def test_a_body_of_a_connection_that_ends_with_it_is_read_to_its_end(server, reader, trusted):
    server.answers += [lambda request: request.send_range(Connection="close")]
    assert _take(reader.open_range(ITEM, 0, len(DATA)), 100) == DATA
