"""Ranges that obstore reads: patient with what is slow, not with what stands still."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from llm_prefetch.errors import OriginUnavailableError
from llm_prefetch.origins import ObjectInfo, open_origin
from llm_prefetch.origins.ranged_store import StoreReader
from tests.samples import raises

DATA = bytes(range(100))


@contextlib.contextmanager
def _store(send: Callable[[Callable[[bytes], None]], None]) -> Iterator[str]:
    """An object store with one object, whose body `send` writes."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.send_response(206)
            for name, value in {
                "Content-Length": len(DATA),
                "Content-Range": f"bytes 0-99/{len(DATA)}",
                "ETag": '"1"',
                "Last-Modified": "Sat, 21 Nov 2026 03:00:00 GMT",
            }.items():
                self.send_header(name, str(value))
            self.end_headers()
            with contextlib.suppress(OSError):  # who gave up is not there any more
                send(self.wfile.write)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _read(endpoint, monkeypatch):
    monkeypatch.setenv("GOOGLE_BASE_URL", endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a token, which cannot sign a URL")
    monkeypatch.setenv("LLM_PREFETCH_STALL_SECONDS", "1")
    reader = open_origin("gs://bucket/p").reader()
    assert isinstance(reader, StoreReader)
    buffer = memoryview(bytearray(len(DATA)))
    body, done = reader.open_range(ObjectInfo("x", len(DATA), ""), 0, len(DATA)), 0
    while count := body.readinto(buffer[done:]):
        done += count
    return bytes(buffer[:done])


def test_an_answer_that_stands_still_is_given_up(monkeypatch):
    given_up = threading.Event()

    def send(write):
        write(DATA[:50])
        assert given_up.wait(60), "the reader waited for a minute"

    with _store(send) as endpoint:
        with raises(OriginUnavailableError, 3, "gs://bucket/p") as caught:
            _read(endpoint, monkeypatch)
        given_up.set()
    assert caught.value.retryable


def test_an_answer_that_is_slow_and_never_stands_still_is_read_to_its_end(monkeypatch):
    def send(write):
        for at in range(0, len(DATA), 10):
            write(DATA[at : at + 10])
            threading.Event().wait(0.2)

    with _store(send) as endpoint:
        assert _read(endpoint, monkeypatch) == DATA
