"""The lean reader, against a real HTTP server that misbehaves on demand."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from llm_prefetch.errors import (
    OriginAccessError,
    OriginChangedError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
)
from llm_prefetch.origins import ObjectInfo
from llm_prefetch.origins.ranged_http import HttpReader
from tests.origins.misbehaving import DATA, ITEM, WHERE, Server
from tests.samples import raises

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def server(no_leaks) -> Iterator[Server]:
    with Server().running() as running:
        yield running


@pytest.fixture
def reader(server) -> Iterator[HttpReader]:
    made = HttpReader(lambda path: f"{server.url}{path}?X-Signature=s3cret", WHERE, 5.0)
    yield made
    made.close()


def _take(body, piece=100):
    taken, buffer = b"", memoryview(bytearray(piece))
    while count := body.readinto(buffer):
        taken += bytes(buffer[:count])
    return taken


def _read(reader, start=0, length=ITEM.size, item=ITEM):
    return _take(reader.open_range(item, start, length))


def test_a_range_is_asked_for_with_the_etag_it_must_have(server, reader):
    assert _read(reader, 10, 20) == DATA[10:30]
    [request] = server.requests
    assert request.line == "GET /bucket/dir/x?X-Signature=s3cret HTTP/1.1"
    assert (request.headers["range"], request.headers["if-match"]) == ("bytes=10-29", '"tag"')


def test_without_an_etag_any_will_do(server, reader):
    assert _read(reader, item=ObjectInfo("x", len(DATA), "")) == DATA
    assert "if-match" not in server.requests[0].headers


def test_ranges_share_a_connection(server, reader):
    for start in range(0, 100, 10):
        assert _read(reader, start, 10) == DATA[start : start + 10]
    assert (len(server.requests), server.connections) == (10, 1)


@pytest.mark.parametrize("piece", [1, 7, 5000])
def test_pieces_of_any_size_add_up(reader, piece):
    assert _take(reader.open_range(ITEM, 5, 500), piece) == DATA[5:505]


def _close_politely(request):
    request.send_range(Connection="close")
    raise ConnectionAbortedError


def _close_silently(request):
    request.send_range()
    raise ConnectionAbortedError


@pytest.mark.parametrize("close", [_close_politely, _close_silently])
def test_a_connection_that_the_server_closed_meanwhile_is_opened_anew(server, reader, close):
    server.answers = [close, close]
    for _ in range(3):
        assert _read(reader) == DATA
    assert server.connections == 3


def _chunked(request):
    start, end = request.range
    body = DATA[start : end + 1]
    framed = b"".join(
        b"%x\r\n%s\r\n" % (len(body[i : i + 50]), body[i : i + 50]) for i in range(0, len(body), 50)
    )
    request.send_range(body=framed + b"0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked")


def test_a_chunked_answer_is_understood_and_leaves_the_connection_open(server, reader):
    server.answers = [_chunked, _chunked]
    for _ in range(3):
        assert _read(reader) == DATA
    assert server.connections == 1


def _reset_at_the_end(request):
    start, end = request.range
    body = DATA[start : end + 1]
    request.send_range(
        body=b"%x\r\n%s\r\n" % (len(body), body), Content_Length=None, Transfer_Encoding="chunked"
    )
    raise ConnectionAbortedError


def test_bytes_that_all_came_count_even_when_the_end_of_the_message_did_not(server, reader):
    server.answers = [_reset_at_the_end]
    assert _read(reader) == DATA
    assert _read(reader) == DATA
    assert server.connections == 2


def _more_than_asked(request):
    request.send_range(body=DATA + b"x" * 100, Content_Length=len(DATA) + 100)


def test_what_a_server_sends_beyond_the_range_is_neither_given_nor_kept(server, reader):
    server.answers = [_more_than_asked]
    assert _read(reader) == DATA
    assert _read(reader) == DATA
    assert server.connections == 2


def _reset_before(request):
    request.reset()


def _reset_amid(request):
    request.send_range(body=DATA[:500])
    request.reset()


def _cut(request):
    request.send_range(body=DATA[:500])
    raise ConnectionAbortedError


def _cut_chunked(request):
    request.send_range(body=b"ff\r\nabc", Content_Length=None, Transfer_Encoding="chunked")
    raise ConnectionAbortedError


def _short_with_matching_length(request):
    request.send_range(body=DATA[:500], Content_Length=500)


def _no_http(request):
    request.connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    raise ConnectionAbortedError


def _endless_header(request):
    request.connection.sendall(b"HTTP/1.1 206 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
    raise ConnectionAbortedError


@pytest.mark.parametrize(
    "fault",
    [
        _reset_before,
        _reset_amid,
        _cut,
        _cut_chunked,
        _short_with_matching_length,
        _no_http,
        _endless_header,
    ],
)
def test_a_connection_that_breaks_may_be_tried_again(server, reader, fault):
    server.answers = [fault]
    with raises(OriginUnavailableError, 3, "'dir/x'", WHERE) as caught:
        _read(reader)
    assert caught.value.retryable
    assert "s3cret" not in str(caught.value)
    assert _read(reader) == DATA


@pytest.mark.parametrize("before", [0, 300])
def test_a_stall_is_given_up_and_may_be_tried_again(server, before):
    def stall(request):
        if before:
            request.send_range(body=DATA[:before])
        server.ended.wait()

    server.answers = [stall]
    reader = HttpReader(lambda path: server.url + path, WHERE, 0.2)
    with raises(OriginUnavailableError, 3, "no byte for 0.2 s", "'dir/x'"):
        _read(reader)
    assert _read(reader) == DATA
    reader.close()


def test_nobody_at_home_may_be_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    reader = HttpReader(lambda path: f"http://127.0.0.1:{port}/{path}", WHERE, 5.0)
    with raises(OriginUnavailableError, 3, "refused", WHERE):
        _read(reader)
    reader.close()


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        ("401 Unauthorized", OriginAccessError, False),
        ("403 Forbidden", OriginAccessError, False),
        ("404 Not Found", OriginNotFoundError, False),
        ("412 Precondition Failed", OriginChangedError, False),
        ("416 Range Not Satisfiable", OriginChangedError, False),
        ("301 Moved Permanently", OriginError, False),
        ("400 Bad Request", OriginError, False),
        ("408 Request Timeout", OriginUnavailableError, True),
        ("429 Too Many Requests", OriginUnavailableError, True),
        ("500 Internal Server Error", OriginUnavailableError, True),
        ("502 Bad Gateway", OriginUnavailableError, True),
        ("503 Slow Down", OriginUnavailableError, True),
        ("504 Gateway Timeout", OriginUnavailableError, True),
    ],
)
def test_a_status_becomes_the_error_that_names_the_mend(server, reader, status, kind, retryable):
    server.answers = [lambda request: request.send(status, {"Content-Length": 4}, b"oops")]
    with raises(kind, 3, "'dir/x'", WHERE) as caught:
        _read(reader)
    assert caught.value.retryable is retryable
    assert "s3cret" not in str(caught.value)
    assert _read(reader) == DATA


@pytest.mark.parametrize(
    "content_range",
    [
        None,
        "",
        "bytes 0-1022/1024",
        "bytes 1-1024/1024",
        "bytes */1024",
        "bytes 0-1023/*",
        "items 0-1023/1024",
    ],
)
def test_an_answer_that_is_not_the_range_asked_for_is_never_taken_for_it(server, reader, content_range):
    server.answers = [lambda request: request.send_range(Content_Range=content_range)]
    with raises(OriginUnavailableError, 3, "not the range asked for", WHERE):
        _read(reader)
    assert _read(reader) == DATA


@pytest.mark.parametrize("content_range", ["bytes 0-1023/1025", "bytes 0-511/512"])
def test_an_object_of_another_size_has_changed(server, reader, content_range):
    server.answers = [lambda request: request.send_range(Content_Range=content_range)]
    with raises(OriginChangedError, 3, "where 1024 were expected", WHERE):
        _read(reader)
    assert _read(reader) == DATA


@pytest.mark.parametrize(
    ("length", "kind"),
    [("1024", OriginError), ("99", OriginChangedError), ("many", OriginError), (None, OriginError)],
)
def test_a_server_that_gives_the_whole_object_for_a_range_is_refused(server, reader, length, kind):
    headers = {"Content-Length": length} if length else {"Transfer-Encoding": "chunked"}
    server.answers = [lambda request: request.send("200 OK", headers, b"0\r\n\r\n")]
    with raises(kind, 3, "'dir/x'", WHERE):
        _read(reader)


def test_a_new_address_gets_a_new_connection(server):
    with Server().running() as other:
        urls = [server.url, other.url, server.url]
        reader = HttpReader(lambda path: urls.pop(0) + path, WHERE, 5.0)
        for _ in range(3):
            assert _read(reader) == DATA
        reader.close()
    assert (len(server.requests), len(other.requests)) == (2, 1)


def test_a_reader_may_be_closed_amid_a_range_and_used_again(server, reader):
    reader.open_range(ITEM, 0, len(DATA)).readinto(memoryview(bytearray(10)))
    reader.close()
    reader.close()
    assert _read(reader) == DATA
