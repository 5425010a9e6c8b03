"""TLS for the lean reader: many records for one system call, in place of two system calls for each record.

A record holds 16 KiB at most. `ssl.SSLSocket` asks the kernel for its five bytes of header and then for the rest; of the
processor time of a staging that was more than the cipher took. Here the socket is read in large pieces into memory,
which costs one more copy, and the records are decrypted from there.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import ssl
from functools import lru_cache
from typing import cast

_READ_BYTES = 256 * 2**10
"""What is asked of the kernel at once; measured in docs/explanation/transfer-performance.md."""


class TlsConnection(http.client.HTTPConnection):
    """`http.client.HTTPSConnection` with the reads of this module; through a tunnel too."""

    default_port = http.client.HTTPS_PORT
    _tunnel_host: str | None

    def connect(self) -> None:
        """Connect, through the proxy if there is one, and shake hands."""
        super().connect()
        plain = self.sock
        try:
            # What http.client uses of a socket: `sendall`, `makefile` and `close`.
            self.sock = cast("socket.socket", _TlsSocket(plain, self._tunnel_host or self.host))
        except BaseException:
            plain.close()
            raise


class _TlsSocket:
    """One TLS connection over `plain`."""

    def __init__(self, plain: socket.socket, host: str) -> None:
        self._plain = plain
        self._came, self._to_go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _trust().wrap_bio(self._came, self._to_go, server_hostname=host)
        self._buffer = memoryview(bytearray(_READ_BYTES))
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._send()
                self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._send()  # tell the server why nobody goes on
                raise
        self._send()

    def sendall(self, data: bytes) -> None:
        self._tls.write(data)
        self._send()

    def readinto(self, buffer: memoryview) -> int:
        """Decrypt what has come, and wait only when that is nothing; 0 at the end, as a socket says it."""
        done = 0
        while done < len(buffer):
            try:
                count = self._tls.read(len(buffer) - done, buffer[done:])
            except ssl.SSLWantReadError:
                if done:
                    break
                self._receive()
            except ssl.SSLEOFError:  # without a farewell, as many servers end; http.client knows the length
                break
            else:
                if not count:
                    break
                done += cast("int", count)
        return done

    def makefile(self, _mode: str = "rb", *_: object) -> io.BufferedReader:
        return io.BufferedReader(_Stream(self, self._plain.makefile("rb", buffering=0)))

    def close(self) -> None:
        self._plain.close()  # the socket itself ends when the last file on it is closed

    def _receive(self) -> None:
        if self._to_go.pending:  # an answer to a change of keys
            self._send()
        count = self._plain.recv_into(self._buffer)
        if count:
            self._came.write(self._buffer[:count])
        else:
            self._came.write_eof()

    def _send(self) -> None:
        if self._to_go.pending:
            self._plain.sendall(self._to_go.read())


class _Stream(io.RawIOBase):
    """An answer that is read from a connection; holds the socket open as `socket.makefile` does."""

    def __init__(self, tls: _TlsSocket, hold: io.IOBase) -> None:
        self._tls, self._hold = tls, hold

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._tls.readinto(memoryview(buffer))

    def close(self) -> None:
        self._hold.close()
        super().close()


@lru_cache(maxsize=4)
def _context(bundle: str | None, _file: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if bundle:
        context.load_verify_locations(bundle)
    return context


def _trust() -> ssl.SSLContext:
    """Trusts what `SSL_CERT_FILE` names, as everywhere; without it `AWS_CA_BUNDLE` too, as boto3 does."""
    file = os.environ.get("SSL_CERT_FILE")
    return _context(None if file else os.environ.get("AWS_CA_BUNDLE"), file)
