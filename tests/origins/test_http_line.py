"""The lines of the lean reader: cut from another thread in whatever they do, and laid through proxies."""

from __future__ import annotations

import base64
import contextlib
import re
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from llm_prefetch.errors import OriginAccessError, OriginError, OriginUnavailableError
from llm_prefetch.origins.ranged_http import HttpReader
from tests.origins.misbehaving import DATA, ITEM, WHERE, Server
from tests.samples import raises

pytestmark = pytest.mark.usefixtures("no_leaks")
PATIENCE = 60.0
"""Seconds that a reader waits by itself: no test does."""
PASSWORD = "pr0xy-s3cret"


def _take(body, piece=100):
    taken, buffer = b"", memoryview(bytearray(piece))
    while count := body.readinto(buffer):
        taken += bytes(buffer[:count])
    return taken


def _read(reader, piece=100):
    return _take(reader.open_range(ITEM, 0, ITEM.size), piece)


# Cutting


@dataclass
class Blocked:
    """A reader that reads in a thread of its own."""

    reader: HttpReader
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self):
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            _read(self.reader, piece=ITEM.size)
        except BaseException as error:
            self.error = error

    def cut(self, *reason):
        """Abort once the reader is surely blocked; returns its error."""
        self.thread.join(0.2)
        assert self.thread.is_alive()
        self.reader.abort(*reason)
        self.thread.join(PATIENCE / 4)
        assert not self.thread.is_alive()
        return self.error


def _never(server):
    return lambda request: server.ended.wait()


def _half(server):
    def answer(request):
        request.send_range(body=DATA[:300])
        server.ended.wait()

    return answer


def _trickle(server):
    def answer(request):
        request.send_range(body=b"")
        for byte in DATA:
            request.connection.sendall(bytes([byte]))
            if server.ended.wait(0.05):
                return

    return answer


@pytest.mark.parametrize("how", [_never, _half, _trickle])
def test_a_reader_that_is_aborted_loses_its_connection_at_once(how):
    with Server().running() as server:
        server.answers = [how(server)]
        reader = HttpReader(lambda path: server.url + path, WHERE, PATIENCE)
        error = Blocked(reader).cut()
        assert type(error) is OriginUnavailableError
        assert error.retryable
        assert "too little came within 60 s" in str(error)
        assert _read(reader) == DATA  # on a new connection
        assert server.connections == 2
        reader.close()


def test_the_one_who_aborts_may_say_why():
    with Server().running() as server:
        server.answers = [_never(server)]
        reader = HttpReader(lambda path: server.url + path, WHERE, PATIENCE)
        assert "cancelled by hand" in str(Blocked(reader).cut("cancelled by hand"))


def test_a_reader_is_aborted_while_it_shakes_hands():
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel connects, and nobody says a word of TLS
        port = mute.getsockname()[1]
        reader = HttpReader(lambda path: f"https://127.0.0.1:{port}/{path}", WHERE, PATIENCE)
        assert type(Blocked(reader).cut()) is OriginUnavailableError


def test_a_reader_is_aborted_while_it_connects():
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # as many as the queue holds, and more: from then on nobody gets in
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        reader = HttpReader(lambda path: f"http://127.0.0.1:{port}/{path}", WHERE, PATIENCE)
        assert type(Blocked(reader).cut()) is OriginUnavailableError


def test_what_a_reader_begins_after_an_abort_fails_until_it_is_closed():
    with Server().running() as server:
        reader = HttpReader(lambda path: server.url + path, WHERE, PATIENCE)
        reader.abort()
        with raises(OriginUnavailableError, 3, WHERE):
            _read(reader)
        assert server.requests == []
        assert _read(reader) == DATA
        reader.abort()  # the connection is idle
        reader.close()
        assert _read(reader) == DATA
        reader.abort()
        with raises(OriginUnavailableError, 3, WHERE):
            _read(reader)
        reader.close()
        assert len(server.requests) == 2


def test_aborts_at_any_moment_harm_nobody():
    """Either the bytes are right or the connection is lost, whatever the reader does when it is cut."""
    with Server().running() as server:
        reader = HttpReader(lambda path: server.url + path, WHERE, PATIENCE)
        done, lost, read = threading.Event(), 0, 0

        def cut():
            while not done.wait(0.003):
                reader.abort()

        cutting = threading.Thread(target=cut)
        cutting.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end or not (lost and read):
            try:
                assert _read(reader) == DATA
                read += 1
            except OriginUnavailableError:
                reader.close()
                lost += 1
        done.set()
        cutting.join()
        reader.close()


# Proxies


@dataclass
class Proxy:
    """A real proxy, which finds every host at one port of this machine."""

    port: int
    password: str | None = None
    lines: list[str] = field(default_factory=list)
    address: str = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
            accepting = threading.Thread(target=self._accept, args=(listener,))
            accepting.start()
            try:
                yield self
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                accepting.join()

    def _accept(self, listener):
        threads = []
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threads.append(threading.Thread(target=self._serve, args=(client,)))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, client):
        with client, contextlib.suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1) or b"\r\n\r\n"
            text = head.decode()
            self.lines.append(text.partition("\r\n")[0])
            login = re.search(r"Proxy-Authorization: Basic (\S+)", text)
            given = base64.b64decode(login[1]).decode() if login else ""
            if self.password is not None and given != f"me:{self.password}":
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self.port)) as server:
                if text.startswith("CONNECT"):
                    client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                else:
                    server.sendall(re.sub(rb"^GET http://[^/]+", b"GET ", head))
                _pass_on(client, server)


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    while True:
        for ready in select.select([one, other], [], [])[0]:
            data = ready.recv(65536)
            if not data:
                return
            (other if ready is one else one).sendall(data)


@pytest.fixture
def proxied(monkeypatch) -> Iterator[Callable[..., contextlib.AbstractContextManager[Proxy]]]:
    """Start a proxy to a server, and name it in the environment."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)

    @contextlib.contextmanager
    def start(server, variable, *, login="", password=None):
        with Proxy(int(server.url.split(":")[2].split("/")[0]), password).running() as proxy:
            monkeypatch.setenv(variable, f"http://{login}{proxy.address}")
            yield proxy

    return start


def _reader(scheme="http", host="origin.test", port=8123):
    return HttpReader(
        lambda path: f"{scheme}://{host}:{port}/bucket/{path}?X-Signature=s3cret", WHERE, PATIENCE
    )


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_plain_http_goes_through_the_proxy_that_the_environment_names(proxied, variable):
    with Server().running() as server, proxied(server, variable) as proxy:
        reader = _reader()
        assert _read(reader) == DATA
        assert _read(reader) == DATA
        reader.close()
    assert proxy.lines == ["GET http://origin.test:8123/bucket/dir/x?X-Signature=s3cret HTTP/1.1"]
    assert server.requests[0].headers["host"] == "origin.test:8123"


@pytest.fixture
def tls(tmp_path, monkeypatch) -> ssl.SSLContext:
    """A certificate of `origin.test`, which this process trusts."""
    options = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=x", "-addext", "subjectAltName=DNS:origin.test"]
    subprocess.run(
        ["openssl", "req", *options, *names, "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


@pytest.mark.parametrize("variable", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
def test_https_goes_through_a_tunnel_and_the_proxy_sees_no_request(proxied, tls, variable):
    with (
        Server(tls=tls).running() as server,
        proxied(server, variable, login=f"me:{PASSWORD}@", password=PASSWORD) as proxy,
    ):
        reader = _reader("https")
        assert _read(reader) == DATA
        reader.close()
    assert [line.rpartition(" ")[0] for line in proxy.lines] == ["CONNECT origin.test:8123"]
    assert "proxy-authorization" not in server.requests[0].headers


def test_a_reader_is_aborted_while_it_waits_behind_a_tunnel(proxied, tls):
    with Server(tls=tls).running() as server, proxied(server, "https_proxy"):
        server.answers = [_never(server)]
        reader = _reader("https")
        assert "through the proxy 127.0.0.1" in str(Blocked(reader).cut())


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("wrong", ["", f"me:not-{PASSWORD}@"])
def test_a_proxy_that_wants_another_password_is_told_without_the_password(proxied, scheme, wrong):
    with (
        Server().running() as server,
        proxied(server, f"{scheme}_proxy", login=wrong, password="another") as proxy,
    ):
        reader = _reader(scheme)
        with raises(OriginAccessError, 3, "407", f"{scheme.upper()}_PROXY") as caught:
            _read(reader)
        reader.close()
    assert PASSWORD not in repr(caught.value) + str(caught.value)
    assert (len(proxy.lines), server.requests) == (1, [])


def test_the_password_of_a_proxy_may_be_escaped(proxied):
    with Server().running() as server, proxied(server, "http_proxy", login="me:a%40%2Fb@", password="a@/b"):
        reader = _reader()
        assert _read(reader) == DATA
        reader.close()


def test_a_proxy_that_is_gone_is_named_without_its_password(proxied, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("http_proxy", f"http://me:{PASSWORD}@{address}")
    with raises(OriginUnavailableError, 3, f"through the proxy {address}", "refused") as caught:
        _read(_reader())
    assert PASSWORD not in repr(caught.value) + str(caught.value)


@pytest.mark.parametrize(("host", "excluded"), [("127.0.0.1", ""), ("localhost", ""), ("127.0.0.1", "*")])
def test_this_machine_is_not_asked_through_a_proxy(proxied, monkeypatch, host, excluded):
    with Server().running() as server, proxied(server, "http_proxy") as proxy:
        monkeypatch.setenv("no_proxy", excluded)
        reader = _reader(host=host, port=proxy.port)
        assert _read(reader) == DATA
        reader.close()
    assert proxy.lines == []


@pytest.mark.parametrize("excluded", ["origin.test", ".test", "*", "a.b,origin.test:8123"])
@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_hosts_that_need_no_proxy_are_asked_directly(proxied, monkeypatch, excluded, variable):
    with Server().running() as server, proxied(server, "http_proxy") as proxy:
        monkeypatch.setenv(variable, excluded)
        with raises(OriginUnavailableError, 3, WHERE):  # nobody has this name
            _read(_reader())
    assert proxy.lines == []


@pytest.mark.parametrize(
    "address", ["socks5://127.0.0.1:1", f"https://me:{PASSWORD}@127.0.0.1:1", "http://h:port", "http://"]
)
def test_a_proxy_of_another_kind_is_refused_in_words(proxied, monkeypatch, address):
    monkeypatch.setenv("http_proxy", address)
    with raises(OriginError, 3, "HTTP_PROXY", "NO_PROXY") as caught:
        _read(_reader())
    assert PASSWORD not in str(caught.value)


def test_a_proxy_may_be_named_without_a_scheme(proxied, monkeypatch):
    with Server().running() as server, proxied(server, "http_proxy") as proxy:
        monkeypatch.setenv("http_proxy", proxy.address)
        reader = _reader()
        assert _read(reader) == DATA
        reader.close()
    assert len(proxy.lines) == 1
