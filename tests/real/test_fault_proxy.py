"""The proxy passes everything on, and does what it is told to, so often and no more."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from tests.real.fault_proxy import fault_proxy
from tests.real.faults import (
    first,
    flip,
    reset,
    silence,
    stall,
    status,
    then,
    truncate,
    wrong_length,
    wrong_range,
)

BODY = bytes(range(200))


class _Origin(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body, code = BODY, 200
        if "Range" in self.headers:
            a, b = self.headers["Range"].removeprefix("bytes=").split("-")
            body, code = BODY[int(a) : int(b) + 1], 206
        if "list-type" in self.path:
            body = self.path.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200, body.decode())
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy(no_leaks):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Origin) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        with fault_proxy(f"http://127.0.0.1:{server.server_port}") as proxy:
            yield proxy
        server.shutdown()
        serving.join()


@pytest.fixture
def client(proxy):
    at = urlsplit(proxy.endpoint)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=10)
    yield connection
    connection.close()


def get(client, path="/x", **headers):
    client.request("GET", path, headers=headers)
    answer = client.getresponse()
    return answer.status, answer.read()


def test_without_a_rule_everything_passes(proxy, client):
    assert get(client) == (200, BODY)
    assert get(client, Range="bytes=10-19") == (206, BODY[10:20])
    client.request("HEAD", "/a%20b")
    answer = client.getresponse()
    assert (answer.status, answer.headers["Content-Length"], answer.headers["ETag"]) == (200, "200", '"x"')
    answer.read()
    client.request("PUT", "/x", body=b"what was sent")
    answer = client.getresponse()
    assert (answer.reason, answer.read()) == ("what was sent", b"")
    assert [(r.method, r.path, r.range) for r in proxy.requests] == [
        ("GET", "/x", ""),
        ("GET", "/x", "bytes=10-19"),
        ("HEAD", "/a b", ""),
        ("PUT", "/x", ""),
    ]


def test_a_rule_is_for_what_it_names_so_often_and_no_more(proxy, client):
    rule = proxy.inject(status(503), "/y$", skip=1, times=2)
    assert [get(client, path)[0] for path in ("/x", "/y", "/y", "/x", "/y", "/y")] == [
        200, 200, 503, 200, 503, 200
    ]  # fmt: skip
    assert rule.hits == 2


def test_a_rule_may_be_only_for_ranges_or_listings(proxy, client):
    ranges = proxy.inject(status(500), ranges=True, times=None)
    lists = proxy.inject(status(429), lists=True, times=None)
    assert [get(client)[0], get(client, Range="bytes=0-1")[0], get(client, "/b?list-type=2")[0]] == [
        200,
        500,
        429,
    ]
    assert (ranges.hits, lists.hits) == (1, 1)
    proxy.mend()
    assert get(client, Range="bytes=0-1")[0] == 206


def test_a_status_has_its_headers_and_the_stores_code(proxy, client):
    proxy.inject(status(429, {"Retry-After": "7"}, store_code="SlowDown"))
    client.request("GET", "/x")
    answer = client.getresponse()
    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
    assert b"<Code>SlowDown</Code>" in answer.read()


@pytest.mark.parametrize(("fault", "came"), [(reset(), None), (reset(after=50), 50)])
def test_a_reset_is_one(proxy, client, fault, came):
    rule = proxy.inject(fault)
    client.request("GET", "/x")
    read = client.getresponse
    if came:
        answer = client.getresponse()
        assert answer.read(came) == BODY[:came]
        read = answer.read
    with pytest.raises(ConnectionResetError) as caught:
        read()
    assert caught.value.errno is not None, "the end of the stream, not a reset"
    assert rule.hits == 1
    client.close()
    assert get(client) == (200, BODY)


def test_a_cut_body_ends_early_and_in_good_order(proxy, client):
    proxy.inject(truncate(50))
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(client)
    assert caught.value.partial == BODY[:50]


@pytest.mark.parametrize("by", [7, -7])
def test_a_wrong_length_is_said_of_a_whole_body(proxy, client, by):
    proxy.inject(wrong_length(by))
    client.request("GET", "/x")
    answer = client.getresponse()
    assert answer.headers["Content-Length"] == str(200 + by)
    if by > 0:
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    else:
        assert answer.read() == BODY[:by]


def test_a_wrong_range_is_another_one(proxy, client):
    proxy.inject(wrong_range(5))
    assert get(client, Range="bytes=10-19") == (206, BODY[15:25])


def test_silence_lasts_until_the_client_goes(proxy, client):
    rule = proxy.inject(silence())
    client.timeout = 0.3
    with pytest.raises(TimeoutError):
        get(client)
    assert rule.hits == 1


def test_a_stall_keeps_the_rest(proxy, client):
    proxy.inject(stall(50))
    client.timeout = 0.5
    client.request("GET", "/x")
    answer = client.getresponse()
    assert answer.read(50) == BODY[:50]
    with pytest.raises(TimeoutError):
        answer.read(1)


def test_a_trickle_gives_byte_after_byte(proxy, client):
    proxy.inject(stall(190, every=0.01))
    assert get(client) == (200, BODY)


def test_a_flipped_bit_is_one(proxy, client):
    proxy.inject(flip(3))
    _, body = get(client)
    assert [(a, b) for a, b in zip(body, BODY, strict=True) if a != b] == [(2, 3)]


def test_something_may_be_done_before_the_origin_is_asked_and_after_it_has_answered(proxy, client):
    done = []
    proxy.inject(first(lambda: done.append("before")), "/x", times=None)
    proxy.inject(then(lambda: done.append("after")), "/y", times=None)
    assert [get(client, path)[1] for path in ("/x", "/x", "/y")] == [BODY] * 3
    assert done == ["before", "after"]


def test_a_listing_may_be_cut_into_small_pages(proxy, client):
    proxy.page_objects = 2
    assert get(client, "/b?list-type=2&prefix=p")[1] == b"/b?list-type=2&prefix=p&max-keys=2"


def test_the_proxy_ends_with_clients_that_still_wait(proxy):
    proxy.inject(silence(), times=None)
    at = urlsplit(proxy.endpoint)
    waiting = socket.create_connection((at.hostname, at.port))
    waiting.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    idle = socket.create_connection((at.hostname, at.port))
    while not proxy.requests:
        time.sleep(0.01)
    proxy.ended.set()
    assert waiting.recv(1) == b""
    waiting.close()
    idle.close()
